"""A progress bar in simulated time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from sim.workload.base import Source


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
