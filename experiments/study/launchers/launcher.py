"""The one interface of all places where tasks run: submit tasks, take the results as they end, cancel.

A launcher is a value of the setting `launcher`. It makes the workers of a command, and `outcomes` drives
them: it asks for the next task whenever a worker has room, so that later tasks may depend on earlier results.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sized
from itertools import count
from math import inf
from typing import Generic

from experiments.study.launchers.outcome import CutShortError, Outcome, R, T, WorkerDiedError
from fieldlimits import Checked
from sim.engine.clock import Interrupt

PATIENCE_S = 0.5
"""Longest time in seconds until Ctrl-C, or in a worker the end of its parent, is noticed."""


class Workers(ABC, Generic[T, R]):
    """Workers that run the tasks of one command, in its process, in others or on other machines."""

    room: int
    """Number of tasks that may be submitted and not ended at a time."""
    grace_s: float = inf
    """How long running tasks may go on after Ctrl-C, in seconds, before they are cancelled."""

    @abstractmethod
    def submit(self, index: int, task: T) -> None:
        """Takes a task. index: of its outcome."""

    @abstractmethod
    def ended(self) -> Iterator[Outcome[R]]:
        """Yields the outcomes of ended tasks, after a wait for the first of at most `PATIENCE_S`."""

    @abstractmethod
    def end(self, *, whole: bool) -> None:
        """Cancels the tasks that run. whole: every task has ended, so that no results need to be kept."""


class Launcher(Checked, ABC):
    """Base of the launchers, whose fields are their settings."""

    __slots__ = ()

    jobs: int | None

    @property
    def num_jobs(self) -> int | None:
        """Number of tasks that run at a time, as far as the settings say it."""
        return self.jobs

    @abstractmethod
    def workers(self, work: Callable[[T], R], num_tasks: int | None) -> Workers[T, R]:
        """Returns workers. num_tasks: their number, if it is known. Raises CannotLaunchError."""

    def outcomes(
        self,
        work: Callable[[T], R],
        tasks: Iterable[T | None],
        interrupt: Interrupt,
        num_tasks: int | None = None,
    ) -> Generator[Outcome[R], None, None]:
        """Yields the outcomes of tasks as they end; after Ctrl-C no task begins.

        tasks: asked for the next one when there is room for it. None in place of a task: there is none until
        a running one has ended; if none runs, that is the end. An outcome's index counts the tasks.
        num_tasks: their number, if it is known and they do not tell it.
        `work`, tasks and results are pickled if they run in other processes. Closing the generator cancels
        all tasks. Raises CannotLaunchError if tasks cannot run.
        """
        left, indices = iter(tasks), count()
        workers = self.workers(work, len(tasks) if isinstance(tasks, Sized) else num_tasks)
        num_busy, whole, ends_s = 0, False, inf
        try:
            while time.monotonic() < ends_s:
                while num_busy < workers.room and not interrupt.noted:
                    if (task := next(left, None)) is None:
                        break
                    workers.submit(next(indices), task)
                    num_busy += 1
                if not num_busy:
                    whole = not interrupt.noted
                    return
                for outcome in workers.ended():
                    num_busy -= 1
                    if isinstance(outcome.error, CutShortError):
                        interrupt.noted = True
                    elif not (interrupt.noted and isinstance(outcome.error, WorkerDiedError)):
                        # SIGTERM to all processes of the command, as Slurm sends it, kills the workers, too.
                        yield outcome
                if interrupt.noted:
                    ends_s = min(ends_s, time.monotonic() + workers.grace_s)
        finally:
            workers.end(whole=whole)
