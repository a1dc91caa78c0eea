"""`launcher=local`: processes of this machine that stay alive, so that each imports only once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Annotated

from experiments.study.launchers.outcome import CutShortError, Outcome, R, T, WorkerDiedError, attempt, exited
from fieldlimits import Checked, PositiveInt
from sim.engine.clock import Interrupt
from sim.settings.errors import ConfigError

GRACE_S = 1.5
"""How long running tasks may go on after Ctrl-C, in seconds, before their processes are killed."""
PATIENCE_S = 0.5
"""Longest time in seconds until Ctrl-C, or in a worker the end of its parent, is noticed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Local(Checked):
    """One process per core, or `jobs` processes; a single one is this process, for debuggers."""

    jobs: Annotated[PositiveInt | None, "null for one per core"] = None
    """Number of processes; None: one per core."""

    def outcomes(
        self, work: Callable[[T], R], tasks: Sequence[T], interrupt: Interrupt
    ) -> Generator[Outcome[R], None, None]:
        """Yields the outcomes of all tasks, see `Launcher`."""
        waiting = deque(tasks)
        return self.as_asked(work, lambda: waiting.popleft() if waiting else None, interrupt)

    def as_asked(
        self, work: Callable[[T], R], next_task: Callable[[], T | None], interrupt: Interrupt
    ) -> Generator[Outcome[R], None, None]:
        """Yields outcomes of tasks that depend on earlier outcomes; next_task is called when a job is free.

        None from next_task: no task until a running one is done; if none is running, the end.
        """
        jobs = self.jobs or os.cpu_count() or 1
        if jobs == 1:
            return _here(work, next_task, interrupt)
        return _in_processes(work, next_task, jobs, interrupt)


def _here(
    work: Callable[[T], R], next_task: Callable[[], T | None], interrupt: Interrupt
) -> Generator[Outcome[R], None, None]:
    index = 0
    while not interrupt.noted and (task := next_task()) is not None:
        result: R | None = None
        failure: Exception | None = None
        try:
            result = work(task)
        except KeyboardInterrupt:
            interrupt.noted = True
            return
        except SystemExit as stop:
            failure = exited(stop)
        except Exception as error:
            failure = error
        yield Outcome(index, result, failure)
        index += 1


def _in_processes(
    work: Callable[[T], R], next_task: Callable[[], T | None], jobs: int, interrupt: Interrupt
) -> Generator[Outcome[R], None, None]:
    """Hands each process one task at a time, so that after Ctrl-C no queued task still runs.

    Each process has its own pipe, so the task of a killed process is known; another process takes its place.
    """
    workers: list[_Worker] = []
    indices = count()
    grace = _Grace(interrupt)
    try:
        while not grace.is_over:
            for i in range(jobs):
                if interrupt.noted:
                    break
                if i < len(workers) and workers[i].index is not None:
                    continue
                task = next_task()
                if task is None:
                    break
                _hand(task, next(indices), work, workers, i)
            busy = {worker.pipe: i for i, worker in enumerate(workers) if worker.index is not None}
            if not busy:
                return
            for pipe in wait(list(busy), timeout=PATIENCE_S):
                i = busy[pipe]  # type: ignore[index]
                outcome: Outcome[R] = workers[i].outcome()
                if isinstance(outcome.error, WorkerDiedError):
                    workers[i] = _Worker(work)
                if isinstance(outcome.error, CutShortError):
                    interrupt.noted = True
                    continue
                if interrupt.noted and isinstance(outcome.error, WorkerDiedError):
                    continue  # SIGTERM to all processes of the command, as Slurm sends it, kills the workers
                yield outcome
    finally:
        for worker in workers:
            worker.end()


class _Grace:
    """The time that running tasks have after Ctrl-C."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self._ends_s: float | None = None

    @property
    def is_over(self) -> bool:
        """True GRACE_S after Ctrl-C; the first call after Ctrl-C starts the time."""
        if not self._interrupt.noted:
            return False
        if self._ends_s is None:
            self._ends_s = time.monotonic() + GRACE_S
        return time.monotonic() >= self._ends_s


def _hand(task: T, index: int, work: Callable[[T], R], workers: list[_Worker], i: int) -> None:
    """Hands a task to worker i, which is started if it does not exist or died while it was idle."""
    if i == len(workers):
        workers.append(_Worker(work))
    if not workers[i].hand(index, task):
        workers[i] = _Worker(work)
        if not workers[i].hand(index, task):
            raise WorkerDiedError("a process ended right after its start; try fewer jobs")


class _Worker:
    """A process, this side of its pipe, and the index of its task."""

    def __init__(self, work: Callable[[T], R]) -> None:
        self.index: int | None = None
        self.pipe, other = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=_serve, args=(other, work, os.getpid()), daemon=True)
        self.process.start()
        other.close()  # so that the pipe reports the end of the process

    def hand(self, index: int, task: T) -> bool:
        """Sends a task; returns whether the process took it. Raises ConfigError if it cannot be pickled."""
        try:
            content = ForkingPickler.dumps(task)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ConfigError(
                f"{task.name}: cannot be sent to another process ({error}); define its classes and functions "
                "in a module, or set jobs=1"
            ) from error
        try:
            self.pipe.send_bytes(content)
        except OSError:
            return False
        self.index = index
        return True

    def outcome(self) -> Outcome[R]:
        """Returns the outcome of the task, once the pipe has data or is closed."""
        index, self.index = self.index, None
        assert index is not None
        try:
            result, error = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            return Outcome(index, None, WorkerDiedError(_end_reason(self.process.exitcode)))
        return Outcome(index, result, error)

    def end(self) -> None:
        """Kills the process, whatever it is doing."""
        self.pipe.close()
        self.process.kill()
        self.process.join()


def _end_reason(exitcode: int | None) -> str:
    how = "ended abruptly"
    if exitcode is not None and exitcode < 0:
        how = f"was killed ({signal.Signals(-exitcode).name})"
    elif exitcode:
        how = f"ended abruptly (exit code {exitcode})"
    why = ", perhaps for lack of memory; try fewer jobs" if exitcode == -signal.SIGKILL else ""
    return f"its process {how}{why}"


def end_with_parent(parent: int) -> None:
    """Ends this process when its parent, a process id, has ended, whatever it is doing meanwhile.

    A pipe does not show the end of the parent: a forked worker, and those forked after it, hold the parent's
    side of it open. So a worker whose parent was killed would wait for ever, with the parent's locks.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(PATIENCE_S)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _serve(pipe: Connection, work: Callable[[T], R], parent: int) -> None:
    """Runs tasks in a worker until the parent ends. SIGINT is ignored, because the parent handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent(parent)
    while True:
        try:
            pipe.send(attempt(work, pipe.recv()))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            return
