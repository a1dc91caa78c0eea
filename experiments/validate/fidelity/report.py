"""Writes the result of a validation: validation.json, and report.html that opens offline."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.validate.fidelity import tables
from experiments.validate.fidelity.curves import to_json
from experiments.validate.fidelity.environment import environment
from experiments.validate.fidelity.errors import Fidelity, Part
from experiments.validate.fidelity.figures import GANTT_ITERATIONS, MAX_REALS, distributions, gantt, over_time
from sim.report.files import write_whole
from sim.report.plain_page import drawn, listed, write_page

EXPLAINED = (
    "Error: simulated / measured − 1. Noise floor: spread of the measured runs, (largest − smallest) / "
    "mean; it needs at least two runs. Verdict: the size of the error compared with the allowed one; “within "
    "noise” is larger than allowed, but not larger than the noise floor. Further down, difference: the mean "
    "absolute difference of two curves."
)


def write_validation(
    folder: Path,
    fidelity: Fidelity,
    *,
    title: str,
    config: Mapping[str, Any],
    notes: Sequence[str] = (),
    parts: Sequence[Part] = (),
    equivalence: str = "",
    measured_environment: Mapping[str, Any] | None = None,
    page: bool = True,
) -> list[Path]:
    """Writes the JSON and, if page is true, the page; returns their paths.

    config: the resolved configuration as plain data. parts: decomposition of the errors. equivalence: a
    sentence on the decisions, if they were compared. measured_environment: environment of the real engine.
    """
    folder.mkdir(parents=True, exist_ok=True)
    notes = [*notes, *dict.fromkeys(note for run in fidelity.reals for note in run.notes)]
    around = {"simulated": environment(config), "measured": dict(measured_environment or {})}
    written = [folder / "validation.json"]
    record = to_record(fidelity, title, config, notes, parts, equivalence, around)
    write_whole(written[0], json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if page:
        written.append(folder / "report.html")
        _write_page(written[1], fidelity, title, config, notes, parts, equivalence, around)
    return written


def to_record(
    fidelity: Fidelity,
    title: str,
    config: Mapping[str, Any],
    notes: Sequence[str],
    parts: Sequence[Part],
    equivalence: str,
    around: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the content of the page as plain data; None for what does not exist."""
    return {
        "title": title,
        "verdict": fidelity.verdict or None,
        "refusal": fidelity.refusal or None,
        "thresholds": fidelity.thresholds.name,
        "measured_runs": [run.name for run in fidelity.reals],
        "requests": len(fidelity.reals[0].requests),
        "decision_equivalence": equivalence or None,
        "metrics": [one.to_json() for one in fidelity.metrics],
        "curves": [to_json(curve) for curve in fidelity.curves],
        "iterations": [one.to_json() for one in fidelity.iterations],
        "decomposition": [{"name": part.name, "errors": dict(part.errors)} for part in parts],
        "notes": list(notes),
        "environment": dict(around),
        "config": dict(config),
    }


def _write_page(
    path: Path,
    fidelity: Fidelity,
    title: str,
    config: Mapping[str, Any],
    notes: Sequence[str],
    parts: Sequence[Part],
    equivalence: str,
    around: Mapping[str, Any],
) -> None:
    runs = ", ".join(run.name for run in fidelity.reals)
    count = len(fidelity.reals[0].requests)
    introduction = f"{count:,} requests, simulated and measured ({html.escape(runs)})."
    verdict = f"<p><strong>{html.escape(tables.verdict_line(fidelity))}</strong></p>"
    sections = {
        "Verdict": verdict + listed([*filter(None, [equivalence, tables.largest_part(parts), *notes])])
    }
    sections["Errors"] = f"<p>{EXPLAINED}</p>{table_html(tables.metric_rows(fidelity), labels=1)}"
    if parts:
        sections["Where the error comes from"] = table_html(tables.part_rows(parts), labels=1)
    sections["Distributions"] = _many(fidelity) + drawn(distributions(fidelity.simulated, fidelity.reals))
    if fidelity.curves:
        rows = table_html(tables.curve_rows(fidelity.curves), labels=1)
        sections["Over time"] = rows + drawn(over_time(fidelity.curves))
    if fidelity.iterations:
        rows = table_html(tables.iteration_rows(fidelity.iterations), labels=3)
        priced = "<p>Each measured iteration compared with the hardware model's time for its shape.</p>"
        sections["Iteration times"] = priced + rows
    if (figure := gantt(fidelity.simulated, fidelity.reals[0])) is not None:
        sections[f"The first {GANTT_ITERATIONS} iterations"] = drawn(figure)
    sections["Environment"] = _folded("versions and machines", around)
    sections["Configuration"] = _folded("settings of the simulated run", config)
    write_page(path, title, introduction, sections)


def _many(fidelity: Fidelity) -> str:
    count = len(fidelity.reals)
    return f"<p>The first {MAX_REALS} of {count} measured runs are drawn.</p>" if count > MAX_REALS else ""


def table_html(rows: Sequence[Sequence[str]], *, labels: int) -> str:
    """Formats a table; the first row is the heading, the first `labels` cells of each row are labels."""
    head, *body = rows
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = "".join(
        f"<tr>{''.join(f'<th>{html.escape(c)}</th>' for c in row[:labels])}"
        f"{''.join(f'<td>{html.escape(c)}</td>' for c in row[labels:])}</tr>"
        for row in body
    )
    table = f"<table style='white-space:nowrap'><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _folded(title: str, content: Mapping[str, Any]) -> str:
    text = html.escape(OmegaConf.to_yaml(OmegaConf.create(dict(content))))
    return f"<details><summary>{html.escape(title)}</summary><pre>{text}</pre></details>"
