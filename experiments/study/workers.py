"""Many runs in processes of this machine, for commands of which one failed run ends all."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.study.launchers.local import Local
from experiments.study.launchers.outcome import R, T
from sim.engine.interrupt import Interrupt
from sim.metrics.result import RunResult
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
    waiting = deque(tasks)
    return as_asked(work, lambda: waiting.popleft() if waiting else None, jobs, interrupt)


def as_asked(
    work: Callable[[T], R], next_task: Callable[[], T | None], jobs: int, interrupt: Interrupt
) -> Generator[tuple[int, R], None, None]:
    """The same for tasks that depend on what others have found: next_task is asked whenever a job is free.

    None: there is nothing to do until a running task is done; if none runs, that is the end. The index counts
    tasks in the order in which they were asked for.
    """
    asked: list[T] = []

    def noted() -> T | None:
        task = next_task()
        if task is not None:
            asked.append(task)
        return task

    outcomes = Local(jobs=jobs).as_asked(work, noted, interrupt)
    try:
        for outcome in outcomes:
            if isinstance(outcome.error, ConfigError):
                raise ConfigError(f"{asked[outcome.index].name}: {outcome.error}") from outcome.error
            if outcome.error is not None:
                raise outcome.error
            yield outcome.index, cast(R, outcome.result)
    finally:
        outcomes.close()


def simulate_config(config: dict[str, Any]) -> RunResult:
    """Simulates a composed config. Raises ConfigError."""
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
