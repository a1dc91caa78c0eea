"""Runs the tasks of commands that end if one of them fails."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sized
from contextlib import closing, contextmanager
from types import MappingProxyType
from typing import Any, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from experiments.app.settings.compose import resolved
from experiments.study.launchers.launcher import Launcher
from experiments.study.launchers.local import Local
from experiments.study.launchers.outcome import R, T
from sim.engine.clock import Interrupt
from sim.metrics.result import RunResult
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, run

Report = Callable[[int, int], None]  # finished tasks, all tasks


def in_turn(
    work: Callable[[T], R], tasks: Iterable[T | None], launcher: Launcher | int, interrupt: Interrupt
) -> Generator[tuple[int, R], None, None]:
    """Yields (index of the task, its result) as tasks end, for commands that end if one task fails.

    tasks: see `Launcher.outcomes`; they may depend on earlier results. launcher: a number stands for so many
    processes of this machine; with one, tasks run in this process, which a debugger can follow. Work that
    Ctrl-C interrupts may raise KeyboardInterrupt: then the other tasks end, and earlier results stay. Raises
    ConfigError with the task's name for settings that cannot run and for a killed process.
    """
    begun: list[T] = []

    def noted() -> Iterator[T | None]:
        for task in tasks:
            if task is not None:
                begun.append(task)
            yield task

    chosen = Local(jobs=launcher) if isinstance(launcher, int) else launcher
    num_tasks = len(tasks) if isinstance(tasks, Sized) else None
    with closing(chosen.outcomes(work, noted(), interrupt, num_tasks)) as outcomes:
        for outcome in outcomes:
            if isinstance(outcome.error, ConfigError):
                raise ConfigError(f"{begun[outcome.index].name}: {outcome.error}") from outcome.error
            if outcome.error is not None:
                raise outcome.error
            yield outcome.index, cast(R, outcome.result)


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
