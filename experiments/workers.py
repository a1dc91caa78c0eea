"""Many runs in processes that stay, so that none imports anything anew; Ctrl-C keeps what is done."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from omegaconf import OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sim.interrupt import Interrupt
from sim.result import RunResult
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, run

Report = Callable[[int, int], None]  # tasks done, tasks in all


class Task(Protocol):
    """What a worker is handed; it can be pickled."""

    @property
    def name(self) -> str:
        """For messages: arm paged, seed 3."""
        ...


T = TypeVar("T", bound=Task)
R = TypeVar("R")


def in_turn(
    work: Callable[[T], R], tasks: Sequence[T], jobs: int, interrupt: Interrupt
) -> Generator[tuple[int, R], None, None]:
    """(index of the task, what `work` makes of it), as they are done; none begins after Ctrl-C.

    With one job all is done here, where a debugger sees it; else in processes, to which `work`, tasks and
    what comes back are pickled. Raises ConfigError, which names the task, for settings that cannot be run and
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
    return _here(work, next_task, interrupt) if jobs == 1 else _in_processes(work, next_task, jobs, interrupt)


def fly(config: dict[str, Any]) -> RunResult:
    """One run of a composed config. Raises ConfigError."""
    return run(*build_run(OmegaConf.create(config)))


def _here(
    work: Callable[[T], R], next_task: Callable[[], T | None], interrupt: Interrupt
) -> Generator[tuple[int, R], None, None]:
    index = 0
    while not interrupt.noted and (task := next_task()) is not None:
        with _named(task):
            result = work(task)
        yield index, result
        index += 1


def _in_processes(
    work: Callable[[T], R], next_task: Callable[[], T | None], jobs: int, interrupt: Interrupt
) -> Generator[tuple[int, R], None, None]:
    """A process is handed one task at a time: at Ctrl-C nothing is queued that would still run."""
    running: dict[Future[R], tuple[int, T]] = {}
    asked = 0
    with ProcessPoolExecutor(jobs, initializer=_leave_ctrl_c_to_the_parent) as pool:
        while True:
            while len(running) < jobs and not interrupt.noted and (task := next_task()) is not None:
                running[pool.submit(work, task)] = asked, task
                asked += 1
            if not running:
                return
            done, _ = wait(running, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in done:
                index, task = running.pop(future)
                with _named(task):
                    result = future.result()
                yield index, result


@contextmanager
def _named(task: Task) -> Iterator[None]:
    """What a run raises about its settings, with the run's name."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{task.name}: {error}") from error
    except BrokenProcessPool as error:
        raise ConfigError(
            f"{task.name}: its process ended abruptly, perhaps for lack of memory; try fewer jobs"
        ) from error


def _leave_ctrl_c_to_the_parent() -> None:
    """In a worker. While it simulates, `Simulation.run` notes Ctrl-C and ends the run early."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


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
