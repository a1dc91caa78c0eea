"""Tables of a what-if comparison: one row per change, one column per metric, and their printing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from experiments.app.terminal import fits, plain_table
from experiments.compare.results import Comparison
from experiments.compare.tables import MARKS
from experiments.compare.whatif.sentences import (
    Answers,
    caveats,
    delta_text,
    introduction,
    left_out,
    limiting,
    value_text,
    verdicts_by_change,
)
from experiments.compare.whatif.settings import BASELINE
from experiments.study.figures import Metric, titled

LEGEND = (
    "Changes in %, or as a factor (×) from two on; SLO attainment: in percentage points. "
    "+ better, - worse, ~ within noise, = the same in every run"
)

FIRST = ("goodput.share", "ttft.p50_s", "ttft.p99_s", "tpot.p99_s")
"""Metrics of the first table."""


def print_answers(answers: Answers, console: Console) -> None:
    """Prints the caveats, the tables of all changes, their legend and the verdicts."""
    console.print(Text("What if", style="bold"))
    console.print(Text(introduction(answers)))
    for line in caveats(answers):
        console.print(Text(f"  {line}", style="yellow"))
    for rows in tables(answers):
        for part in _fitting(rows, console):
            console.print(plain_table(part, _labels(part)))
    console.print(Text(f"  {LEGEND}", style="dim"))
    for arm, lines in verdicts_by_change(answers).items():
        words = " ".join(answers.questions.experiment.arms[arm])
        console.print(Text(arm if arm == words else f"{arm} ({words})", style="bold"), soft_wrap=True)
        for line in lines:
            console.print(Text(f"  {line}"), soft_wrap=True)
    for line in left_out(answers):
        console.print(Text(line, style="dim"), soft_wrap=True)


def tables(answers: Answers) -> list[list[list[str]]]:
    """Returns two tables, of latencies, and of throughput and cost: heading, baseline, changes."""
    metrics = answers.questions.experiment.metrics
    first = [metric for metric in metrics if metric.key in FIRST]
    others = [metric for metric in metrics if metric.key not in FIRST]
    return [_table(answers, first, limits=True), _table(answers, others, limits=False)]


def _table(answers: Answers, metrics: Sequence[Metric], *, limits: bool) -> list[list[str]]:
    rows = [["", *map(titled, metrics), *(["limited by"] if limits else [])]]
    for arm in answers.questions.experiment.arms:
        cells = [_cell(answers.found.of(metric, arm)[0]) for metric in metrics]
        rows.append([arm, *cells, *([limiting(answers, arm)] if limits else [])])
    return rows


def _cell(comparison: Comparison) -> str:
    if comparison.arm == BASELINE:
        return value_text(comparison)
    text, mark = delta_text(comparison), MARKS.get(comparison.outcome) if comparison.outcome else None
    return text if mark is None or text == mark.strip() else f"{text}{mark}"


def _labels(rows: Sequence[Sequence[str]]) -> tuple[int, ...]:
    return (0, *(i for i, heading in enumerate(rows[0]) if heading == "limited by"))


def _fitting(rows: list[list[str]], console: Console) -> list[list[list[str]]]:
    """Splits the table into as many as fit the console, each with the first column."""
    if len(rows[0]) <= 2 or fits(plain_table(rows, _labels(rows)), console):
        return [rows]
    middle = (len(rows[0]) + 2) // 2
    left, right = ([[row[0], *row[part]] for row in rows] for part in (slice(1, middle), slice(middle, None)))
    return [*_fitting(left, console), *_fitting(right, console)]
