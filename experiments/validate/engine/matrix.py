"""Tables of a suite's results: one row per case, one column per metric."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from experiments.app.terminal import fits, plain_table
from experiments.validate.engine.verdict import Verdict
from experiments.validate.fidelity.errors import MetricError
from experiments.validate.fidelity.report import table_html
from experiments.validate.fidelity.tables import VERDICTS, plain_percent, signed_percent
from sim.report import numbers
from sim.report.files import write_whole
from sim.report.plain_page import write_page

SHOWN = {
    "ttft_mean_s": "TTFT",
    "tpot_mean_s": "TPOT",
    "e2e_mean_s": "E2E",
    "output_tokens_per_s": "tokens/s",
    "iteration_median": "iteration",
}
"""Metrics on the terminal; files contain all."""


class Row(NamedTuple):
    """One case of a suite."""

    name: str
    verdict: Verdict
    files: list[Path]


def print_matrix(rows: Sequence[Row], console: Console) -> None:
    """Prints the errors of the means, with their noise floor if the terminal is wide enough."""
    table = plain_table(matrix_rows(rows, SHOWN))
    text = "Errors of the simulated figures"
    if fits(table, console):
        text += "; in brackets: the engine's own spread from run to run"
    else:
        table = plain_table(matrix_rows(rows, SHOWN, with_noise=False))
    console.print(table)
    console.print(
        f"{text}. Decisions: plans that the simulator reproduced, of all plans.",
        highlight=False,
        soft_wrap=True,
    )


def matrix_rows(
    rows: Sequence[Row], shown: dict[str, str] | None = None, *, with_noise: bool = True
) -> list[list[str]]:
    """Returns a heading and one row per case. shown: headings by metric name; None: all metrics."""
    if shown is None:
        shown = {one.metric.name: one.metric.label for one in rows[0].verdict.fidelity.metrics}
    table = [["case", "decisions", *shown.values(), "verdict"]]
    for row in rows:
        errors = {one.metric.name: one for one in row.verdict.fidelity.metrics}
        cells = [_cell(errors.get(name), with_noise) for name in shown]
        verdict = _in_words(row.verdict)
        table.append([row.name, _decisions(row.verdict), *cells, verdict])
    return table


def _cell(one: MetricError | None, with_noise: bool) -> str:
    if one is None or math.isnan(one.error):
        return numbers.MISSING
    signed = plain_percent if one.metric.family == "iteration" else signed_percent
    has_noise = with_noise and not math.isnan(one.noise)
    return f"{signed(one.error)} ({100 * one.noise:.1f})" if has_noise else signed(one.error)


def _in_words(verdict: Verdict) -> str:
    if not verdict.is_equal:
        return "plans that differ"
    return "too noisy" if verdict.fidelity.refusal else VERDICTS[verdict.fidelity.verdict]


def _decisions(verdict: Verdict) -> str:
    return "100 %" if verdict.is_equal else f"{100 * verdict.share_equal:.2f} %"


def write_matrix(folder: Path, rows: Sequence[Row], *, page: bool) -> list[Path]:
    """Writes suite.json and suite.html; returns their paths."""
    written = [folder / "suite.json"]
    record = {row.name: _record(row) for row in rows}
    write_whole(written[0], json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    if page:
        written.append(folder / "suite.html")
        names = [html.escape(row.name) for row in rows]
        links = "".join(f"<li><a href='{name}/report.html'>{name}</a></li>" for name in names)
        sections = {
            "Errors of all figures": table_html(matrix_rows(rows), labels=1),
            "Where the error comes from": table_html(part_rows(rows), labels=2),
            "Decisions": _list([f"{row.name}: {row.verdict.decisions}" for row in rows]),
            "Reports": f"<ul>{links}</ul>",
        }
        introduction = (
            "Simulated compared with our engine; in brackets: the engine's own spread from run to run, in %."
        )
        write_page(written[1], "Validation", introduction, sections)
    return written


def part_rows(rows: Sequence[Row]) -> list[list[str]]:
    """Returns the decomposition of every case."""
    table = []
    for row in rows:
        if row.verdict.decomposition is not None:
            for part in row.verdict.decomposition.parts:
                table.append([row.name, part.name, *map(signed_percent, part.errors.values())])
                metrics = list(part.errors)
    return [["case", "part", *metrics], *table] if table else [["case", "part"]]


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>"


def _record(row: Row) -> dict[str, Any]:
    verdict = row.verdict
    parts = () if verdict.decomposition is None else verdict.decomposition.parts
    return {
        "verdict": (verdict.fidelity.verdict or None) if verdict.is_equal else "plans that differ",
        "refusal": verdict.fidelity.refusal or None,
        "decisions": verdict.decisions,
        "plans_equal": verdict.num_equal,
        "plans": verdict.num_steps,
        "share_equal": verdict.share_equal,
        "metrics": [one.to_json() for one in verdict.fidelity.metrics],
        "decomposition": {part.name: dict(part.errors) for part in parts},
    }
