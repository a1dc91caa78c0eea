"""Progress bar of an observed run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from sim.workload.base import Source

REFRESHES_PER_S = 2  # drawing takes CPU time from the client


@contextmanager
def requests_sent(
    console: Console, *, enabled: bool
) -> Iterator[Callable[[Source], Callable[[float, int, int], None] | None]]:
    """Yields a function that makes a bar for a source; it returns a callback (seconds, sent, ended requests).

    It draws on a terminal only.
    """
    if not (enabled and console.is_terminal):
        yield lambda source: None
        return
    columns = (
        TextColumn("observing"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[sent]:,} sent, {task.fields[ended]:,} ended"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, refresh_per_second=REFRESHES_PER_S) as progress:

        def begin(source: Source) -> Callable[[float, int, int], None]:
            task = progress.add_task("", total=source.num_requests, sent=0, ended=0)

            def report(now: float, num_sent: int, num_ended: int) -> None:
                progress.update(task, completed=num_ended, sent=num_sent, ended=num_ended)

            return report

        yield begin
