"""Many runs in processes of this machine, for commands of which one failed run ends all."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.launchers.local import Local
from experiments.launchers.outcome import R, T
from sim.interrupt import Interrupt
from sim.result import RunResult
from sim.settings.errors import ConfigError
from sim.settings.resolve import resolved
from sim.settings.scenario import build_run, run

Report = Callable[[int, int], None]  # tasks done, tasks in all


def in_turn(
    work: Callable[[T], R], tasks: Sequence[T], jobs: int, interrupt: Interrupt
) -> Generator[tuple[int, R], None, None]:
    """(index of the task, what `work` makes of it), as they are done; none begins after Ctrl-C.

    With one job all is done here, where a debugger sees it; else in processes, to which `work`, tasks and
    what comes back are pickled. Work that Ctrl-C cuts short may raise KeyboardInterrupt: then the others end,
    and what came back stays. Raises ConfigError, which names the task, for settings that cannot be run and
    for a process that was killed.
    """
    outcomes = Local(jobs=jobs).outcomes(work, tasks, interrupt)
    try:
        for outcome in outcomes:
            if isinstance(outcome.error, ConfigError):
                raise ConfigError(f"{tasks[outcome.index].name}: {outcome.error}") from outcome.error
            if outcome.error is not None:
                raise outcome.error
            yield outcome.index, cast(R, outcome.result)
    finally:
        outcomes.close()


def fly(config: dict[str, Any]) -> RunResult:
    """One run of a composed config. Raises ConfigError."""
    return run(*build_run(resolved(config)))


@contextmanager
def progress_of(console: Console, *, enabled: bool, what: str = "runs") -> Iterator[Report]:
    """A bar on a terminal; elsewhere nothing."""
    if not (enabled and console.is_terminal):
        yield lambda done, total: None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)
