"""Formats the table at the end of a GPU run: a line per part, its failures and its rows' summaries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.gpu.sensors import in_words

MOST_LINES = 30  # per part
WIDTH = 150


def table_of(gpu: str, folder: Path, found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Returns the lines of the table; `found` maps the parts' names to the contents of their files."""
    lines = [f"== {gpu}: {folder} =="]
    for name, part in found.items():
        rows = part["rows"]
        failed = [row for row in rows if "error" in row or row.get("ok") is False]
        missed = sum(row.get("met") is False for row in rows)
        count = f"{len(rows)} rows" + (f", {len(failed)} failed" if failed else "")
        count += f", {missed} below their target" if missed else ""
        count += (
            f", {len(part['not_measured'])} not begun for lack of time" if part.get("not_measured") else ""
        )
        lines.append(f"{name:19} {part['status']:12} {part['seconds']:6.1f} s  {part.get('why', count)}")
        if sensors := in_words(part.get("sensors", {})):
            lines.append(f"  {sensors}")
        details = [f"  FAILED {row['name']}: {_why(row)}" for row in failed]
        if part["status"] in ("died", "out of time") and not failed:
            details += [f"  log: {line}" for line in part.get("log", [])[-6:] if line.strip()]
        details += [f"  {row['name']}: {row['said']}" for row in rows if "said" in row]
        details += [f"  {row['name']}: {row['unavailable']}" for row in rows if "unavailable" in row]
        lines += [line if len(line) <= WIDTH else line[: WIDTH - 3] + "..." for line in details[:MOST_LINES]]
        if len(details) > MOST_LINES:
            lines.append(f"  {len(details) - MOST_LINES} more lines in {name}.json")
    return lines


def _why(row: Mapping[str, Any]) -> str:
    text = str(row.get("error") or row.get("why") or "the check does not hold")
    return " ".join(text.split())
