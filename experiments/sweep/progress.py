"""Progress over a whole sweep: runs done, failed, a second, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Report = Callable[[int, int], None]  # runs done, runs that came to nothing


@contextmanager
def sweep_progress(console: Console, total: int, already: int, *, enabled: bool) -> Iterator[Report]:
    """A bar on a terminal; elsewhere nothing. already: runs that were done before."""
    if not (enabled and console.is_terminal):
        yield lambda done, failed: None
        return
    columns = (
        TextColumn("runs"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[failed]} failed, {task.fields[rate]:.1f}/s, {task.fields[left]} left"),
        TimeElapsedColumn(),
    )
    begun = time.monotonic()
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total, completed=already, failed=0, rate=0.0, left="-:--:--")

        def report(done: int, failed: int) -> None:
            ended = done + failed
            rate = (ended - already) / max(time.monotonic() - begun, 1e-9)
            left = str(timedelta(seconds=round((total - ended) / rate))) if rate > 0 else "-:--:--"
            progress.update(bar, completed=ended, failed=failed, rate=rate, left=left)

        yield report
