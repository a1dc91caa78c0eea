"""Tables of a comparison: rows of text for the page and the terminal, and their printing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.app.terminal import fits, plain_table
from experiments.compare.results import Comparison, Results
from experiments.compare.sentences import caveats, verdicts
from experiments.study.figures import Metric, titled, unit_of
from experiments.study.verdicts import LEVEL, interval_text, ratio_text
from sim.metrics.confidence import Held, Outcome
from sim.report.numbers import MISSING, half_text, mean_text, with_interval
from sim.settings.build import shown

OUTCOMES = {
    Outcome.BETTER: "better",
    Outcome.WORSE: "worse",
    Outcome.NO_DIFFERENCE: "noise",
    Outcome.EQUAL: "equal",
    Outcome.UNKNOWN: MISSING,
    None: "",
}
MARKS = {Outcome.BETTER: " +", Outcome.WORSE: " -", Outcome.NO_DIFFERENCE: " ~", Outcome.EQUAL: " ="}
COLOURS = {Held.HELD: "bold green", Held.MISSED: "bold red", Held.UNDECIDED: "bold yellow"}


def print_results(found: Results, console: Console) -> None:
    """Prints an experiment's claim, its caveats, and the table of its arms."""
    experiment = found.experiment
    console.print(Text(experiment.title, style="bold"))
    console.print(Text(experiment.claim))
    if experiment.source:
        console.print(Text(f"Source: {experiment.source}", style="dim"))
    for caveat in caveats(found):
        console.print(Text(f"  {caveat}", style="yellow"))
    if experiment.sweep is None:
        console.print(_short_table(found))
    else:
        console.print(Text(f"  against {experiment.baseline}: + better, - worse, ~ noise, = equal", "dim"))
        for metric in experiment.metrics:
            for table in _swept_tables(found, metric, console):
                console.print(table)
    for i, sentence in enumerate(verdicts(found)):
        style = COLOURS[found.judged[i].held] if i < len(found.judged) else ""
        console.print(Text(sentence, style=style), soft_wrap=True)  # one line each, for grep


def metric_rows(found: Results, metric: Metric) -> list[list[str]]:
    """Returns one row per comparison of a metric; the heading first."""
    sweep, experiment = found.experiment.sweep, found.experiment
    axis = [sweep.label or sweep.key] if sweep else []
    rows = [
        [arm, *([shown(comparison.swept)] if sweep else []), *_cells(comparison)]
        for arm in experiment.arms
        for comparison in found.of(metric, arm)
    ]
    return [["arm", *axis, *_headings(found)], *rows]


def _headings(found: Results) -> list[str]:
    return [
        "mean",
        "±",
        f"over {found.experiment.baseline}",
        LEVEL,
        "blocks" if found.traced else "seeds",
        "verdict",
    ]


def _short_table(found: Results) -> Table:
    """Returns the table without a sweep: one block per metric, one row per arm."""
    table = plain_table([["", *_headings(found)]])
    for metric in found.experiment.metrics:
        table.add_row(Text(titled(metric), style="bold"))
        for arm in found.experiment.arms:
            last = arm == list(found.experiment.arms)[-1]
            table.add_row(f"  {arm}", *_cells(found.of(metric, arm)[0]), end_section=last)
    return table


def _swept_tables(found: Results, metric: Metric, console: Console) -> Iterator[Table]:
    """Yields tables of means with one row per swept value and one column per arm, as many as fit."""
    left = list(found.experiment.arms)
    while left:
        num_arms = len(left)
        while num_arms > 1 and not fits(_swept_table(found, metric, left[:num_arms]), console):
            num_arms -= 1
        yield _swept_table(found, metric, left[:num_arms])
        left = left[num_arms:]


def _swept_table(found: Results, metric: Metric, arms: Sequence[str]) -> Table:
    experiment = found.experiment
    assert experiment.sweep is not None
    by_arm = {arm: found.of(metric, arm) for arm in arms}
    rows = [
        [shown(value), *_marked(by_arm[arm][i] for arm in arms)] for i, value in enumerate(experiment.swept)
    ]
    table = plain_table([[experiment.sweep.label or experiment.sweep.key, *arms], *rows])
    table.title, table.title_justify, table.title_style = titled(metric), "left", "bold"
    return table


def _marked(comparisons: Iterator[Comparison]) -> Iterator[str]:
    for comparison in comparisons:
        outcome = comparison.outcome
        mark = MARKS.get(outcome, "  ") if outcome else "  "
        yield f"{with_interval(comparison.mean, unit_of(comparison.metric)[0])}{mark}"


def _cells(comparison: Comparison) -> list[str]:
    """Returns the cells below `_headings`."""
    mean, metric, paired = comparison.mean, comparison.metric, comparison.paired
    ratio, interval = ("", "") if paired is None else (ratio_text(paired), interval_text(paired.ratio))
    return [
        mean_text(mean, unit_of(metric)[0]),
        half_text(mean, unit_of(metric)[0]),
        ratio,
        interval,
        str(mean.num_values if paired is None else paired.num_pairs),
        OUTCOMES[comparison.outcome],
    ]
