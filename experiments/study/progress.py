"""Shows the progress of a long command: finished and failed parts, their rate and the remaining time."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sim.report.wording import plural

SECONDS_BETWEEN_LINES = 30.0
"""Seconds between progress lines if there is no terminal."""

Report = Callable[[int, int], None]  # finished parts, failed or refused parts


@contextmanager
def lasting_progress(
    console: Console,
    total: int,
    already: int,
    *,
    enabled: bool,
    part: str = "run",
    failure: str = "failed",
) -> Iterator[Report]:
    """Shows a progress bar on a terminal, else a line on stderr now and then.

    total: number of parts. already: number of parts that were finished before. part, failure: a part and its
    failure in words.
    """
    if not enabled:
        yield lambda done, failed: None
        return
    begun = time.monotonic()

    def rate_and_remaining(ended: int) -> tuple[float, str]:
        """Returns parts per second and the estimated remaining time."""
        rate = (ended - already) / max(time.monotonic() - begun, 1e-9)
        if rate <= 0:
            return rate, "-:--:--"
        return rate, str(timedelta(seconds=round((total - ended) / rate)))

    if not console.is_terminal:
        last_s = begun

        def line(done: int, failed: int) -> None:
            nonlocal last_s
            if time.monotonic() - last_s < SECONDS_BETWEEN_LINES:
                return
            last_s = time.monotonic()
            rate, left = rate_and_remaining(done + failed)
            ended = f"{done + failed:,} of {plural(total, part)}, {failed:,} {failure}"
            print(f"{ended}, {rate:.1f}/s, {left} left", file=sys.stderr, flush=True)

        yield line
        return
    columns = (
        TextColumn(f"{part}s"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(
            f"{{task.fields[failed]}} {failure}, {{task.fields[rate]:.1f}}/s, {{task.fields[left]}} left"
        ),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total, completed=already, failed=0, rate=0.0, left="-:--:--")

        def report(done: int, failed: int) -> None:
            ended = done + failed
            rate, left = rate_and_remaining(ended)
            progress.update(bar, completed=ended, failed=failed, rate=rate, left=left)

        yield report
