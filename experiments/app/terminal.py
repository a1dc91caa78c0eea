"""The summary of a run on the terminal: verdict, latencies (overall and by class), headline figures, energy.

The layout is made for 100 columns. On a narrower terminal the latency table is transposed and the blocks of
figures stand one below the other. No figure is ever truncated.

While the run goes on, the terminal has a progress bar in simulated time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from sim.report import lines, wording
from sim.report.wording import bill_line, dialect_tables, training_line
from sim.workload.base import Source

WIDE_COLUMNS = 96
"""Width, in columns, from which the three blocks of figures stand side by side if they fit."""


def terminal_console(**settings: Any) -> Console:
    """Returns the console of a command. Output to a file or a pipe has 100 columns."""
    console = Console(**settings)
    if not console.is_terminal:
        console.width = 100
    return console


def print_verdict(summary: dict[str, Any], caveats: Iterable[str], console: Console) -> None:
    """Prints whether the SLO was attained (without an SLO: the throughput), and the caveats of the run."""
    goodput = summary["goodput"]
    attained = goodput and goodput["attained"]
    colour = "bold" if not goodput or attained is None else "bold green" if attained else "bold red"
    console.print(Text(wording.verdict(summary), style=colour))
    if goodput and attained is not None:
        console.print(Text("  " + "; ".join(wording.slo_terms(goodput)), style="dim"))
    for caveat in caveats:
        console.print(Text(f"  {caveat}", style="yellow"))


def print_summary(summary: dict[str, Any], console: Console) -> None:
    """Prints the summary that `sim.metrics.summary.summarise` returned."""
    print_verdict(summary, lines.caveats(summary), console)
    latencies = [["ms", *wording.STATISTICS, "count"], *wording.latency_rows(summary)]
    print_tables([latencies, *wording.class_tables(summary)], console)
    console.print(_figures(summary, console))
    if busy := wording.busy_line(summary):
        console.print(Text(busy, style="dim"))
    if pools := wording.pool_table(summary):
        print_tables([pools], console)
    print_tables([rows for rows in (wording.own_table(summary), *dialect_tables(summary)) if rows], console)
    for line in (*lines.pressure_lines(summary), *lines.fleet_lines(summary)):
        console.print(Text(line))
    for line in lines.interval_lines(summary):
        console.print(Text(line, style="dim"))
    for line in (wording.energy_line(summary), bill_line(summary), training_line(summary)):
        if line:
            console.print(Text(line))


def print_tables(tables: Iterable[Sequence[Sequence[str]]], console: Console) -> None:
    """Prints tables, each given as rows of cells with the heading first."""
    for rows in tables:
        for table in _fitting(rows, console):
            console.print(table)


def _fitting(rows: Sequence[Sequence[str]], console: Console) -> Iterator[Table]:
    """Yields the rows as one table or, if that is too wide, as several transposed tables that fit."""
    for table in (plain_table(rows), _close(plain_table(rows))):
        if fits(table, console):
            yield table
            return
    heading, *left = rows
    while left:
        num_rows = len(left)
        while num_rows > 1 and not fits(_turned(heading, left[:num_rows]), console):
            num_rows -= 1
        yield _turned(heading, left[:num_rows])
        left = left[num_rows:]


def _turned(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    return _close(plain_table(list(zip(heading, *rows, strict=True))))


def _close(table: Table) -> Table:
    """Sets one space between the columns of a table and returns it."""
    table.padding = (0, 1, 0, 0)
    return table


def _figures(summary: dict[str, Any], console: Console) -> Table:
    """Returns the headline blocks side by side, two columns each, or one below the other."""
    blocks = wording.headline(summary)
    if console.width >= WIDE_COLUMNS:
        rows = zip(*(block.items() for block in blocks.values()), strict=True)
        headings = [text for title in blocks for text in (title, "")]
        side_by_side = plain_table(
            [headings, *([text for item in row for text in item] for row in rows)], (0, 2, 4)
        )
        if fits(side_by_side, console):
            return side_by_side
    below = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    below.add_column(overflow="fold")
    below.add_column(justify="right", overflow="fold")
    for title, block in blocks.items():
        below.add_row(title, style="bold")
        for i, item in enumerate(block.items(), start=1):
            below.add_row(*item, end_section=i == len(block))
    return below


def plain_table(rows: Sequence[Sequence[str]], label_columns: Collection[int] = (0,)) -> Table:
    """Returns a table whose heading is the first row, with labels aligned left and figures right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, heading in enumerate(rows[0]):
        table.add_column(heading, justify="left" if i in label_columns else "right", overflow="fold")
    for row in rows[1:]:
        table.add_row(*row)
    return table


def fits(table: Table, console: Console) -> bool:
    """Returns whether the table fits the console without breaking a cell."""
    unlimited = console.options.update(width=10_000)
    return Measurement.get(console, unlimited, table).maximum <= console.width


@contextmanager
def simulated_time(
    console: Console, source: Source, until_s: float | None, *, enabled: bool
) -> Iterator[Callable[[float, int], None] | None]:
    """Yields the callback of `Simulation.run` that draws the bar, or None if no bar is drawn.

    The callback takes the simulated time in seconds and the number of requests that have ended. The bar
    runs to until_s or the last arrival, or, if neither is known, to the number of requests. It is drawn
    only on a terminal.
    """
    if not (enabled and console.is_terminal):
        yield None
        return
    in_time = until_s if until_s is not None else source.last_arrival_s
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[clock]} simulated, {task.fields[ended]:,} requests ended"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=in_time or source.num_requests, clock="0:00:00", ended=0)

        def report(now: float, num_ended: int) -> None:
            completed = min(now, in_time) if in_time else num_ended
            clock = str(timedelta(seconds=int(now)))
            progress.update(task, completed=completed, clock=clock, ended=num_ended)

        yield report
