"""Runs tasks in processes of this machine, for commands that end if one run fails."""

from __future__ import annotations

import importlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.app.settings.compose import resolved
from experiments.study.launchers.local import Local
from experiments.study.launchers.outcome import R, T
from sim.engine.clock import Interrupt
from sim.metrics.result import RunResult
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, run

Report = Callable[[int, int], None]  # finished tasks, all tasks


def in_turn(
    work: Callable[[T], R], tasks: Sequence[T], jobs: int, interrupt: Interrupt
) -> Generator[tuple[int, R], None, None]:
    """Yields (index of the task, its result) as tasks finish; none starts after Ctrl-C.

    With one job, tasks run in this process, which a debugger can follow; otherwise in processes, so that
    `work`, tasks and results are pickled. Work that Ctrl-C interrupts may raise KeyboardInterrupt: then the
    other tasks end, and earlier results stay. Raises ConfigError with the task's name for settings that
    cannot run and for a killed process.
    """
    waiting = deque(tasks)
    return as_asked(work, lambda: waiting.popleft() if waiting else None, jobs, interrupt)


def as_asked(
    work: Callable[[T], R], next_task: Callable[[], T | None], jobs: int, interrupt: Interrupt
) -> Generator[tuple[int, R], None, None]:
    """Yields results of tasks that depend on earlier results; next_task is called when a job is free.

    None from next_task: no task until a running one is done; if none is running, the end. The index counts
    tasks in the order of the calls.
    """
    given: list[T] = []

    def next_noted() -> T | None:
        task = next_task()
        if task is not None:
            given.append(task)
        return task

    outcomes = Local(jobs=jobs).as_asked(work, next_noted, interrupt)
    try:
        for outcome in outcomes:
            if isinstance(outcome.error, ConfigError):
                raise ConfigError(f"{given[outcome.index].name}: {outcome.error}") from outcome.error
            if outcome.error is not None:
                raise outcome.error
            yield outcome.index, cast(R, outcome.result)
    finally:
        outcomes.close()


def simulate_config(config: dict[str, Any], objects: Mapping[str, Any] = MappingProxyType({})) -> RunResult:
    """Simulates a composed config. Raises ConfigError, and KeyboardInterrupt after Ctrl-C.

    objects: replace nodes of the config, by their root key.
    """
    return run(*build_run(resolved(config), objects))


def whole(result: RunResult) -> RunResult:
    """Returns the result of a whole run. Raises KeyboardInterrupt if Ctrl-C cut it short."""
    if result.summary["interrupted"]:
        raise KeyboardInterrupt
    return result


@contextmanager
def progress_of(console: Console, *, enabled: bool, what: str = "runs") -> Iterator[Report]:
    """Yields a progress callback: a bar on a terminal and in a notebook, nothing elsewhere."""
    if enabled and console.is_jupyter:
        yield _notebook_bar(what)
        return
    if not (enabled and console.is_terminal):
        yield lambda done, total: None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=None)
        yield lambda done, total: progress.update(bar, completed=done, total=total)


def _notebook_bar(what: str) -> Report:
    """Returns the callback that draws a bar below the cell of a notebook; rich's would need ipywidgets."""
    notebook: Any = importlib.import_module("IPython.display")

    def bar(done: int, total: int) -> Any:
        return notebook.HTML(
            f"<progress value={done} max={max(total, 1)}></progress> {done} of {total} {what}"
        )

    shown = notebook.display(bar(0, 1), display_id=True)
    return lambda done, total: shown.update(bar(done, total))
