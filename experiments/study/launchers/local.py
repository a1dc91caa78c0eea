"""`launcher=local`: processes of this machine that stay alive, so that each imports only once."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from typing import Annotated

from experiments.study.launchers.launcher import PATIENCE_S, Launcher, Workers
from experiments.study.launchers.outcome import CutShortError, Outcome, R, T, WorkerDiedError, attempt, exited
from fieldlimits import PositiveInt
from sim.settings.errors import ConfigError

GRACE_S = 1.5
"""How long running tasks may go on after Ctrl-C, in seconds, before their processes are killed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Local(Launcher):
    """One process per core, or `jobs` processes; a single one is this process, for debuggers."""

    jobs: Annotated[PositiveInt | None, "null for one per core"] = None
    """Number of processes; None: one per core."""

    def workers(self, work: Callable[[T], R], num_tasks: int | None) -> Workers[T, R]:
        """Returns the workers, see `Launcher`."""
        jobs = self.jobs or os.cpu_count() or 1
        return _Here(work) if jobs == 1 else _Processes(work, jobs)


class _Here(Workers[T, R]):
    """This process, which runs one task at a time."""

    room = 1

    def __init__(self, work: Callable[[T], R]) -> None:
        self._work = work
        self._submitted: list[tuple[int, T]] = []

    def submit(self, index: int, task: T) -> None:
        self._submitted.append((index, task))

    def ended(self) -> Iterator[Outcome[R]]:
        index, task = self._submitted.pop()
        result: R | None = None
        failure: Exception | None = None
        try:
            result = self._work(task)
        except KeyboardInterrupt:
            failure = CutShortError()
        except SystemExit as stop:
            failure = exited(stop)
        except Exception as error:
            failure = error
        yield Outcome(index, result, failure)

    def end(self, *, whole: bool) -> None:
        pass


class _Processes(Workers[T, R]):
    """Processes that get one task at a time, so that after Ctrl-C no queued task still runs.

    Each has its own pipe, so the task of a killed process is known; another process takes its place.
    """

    grace_s = GRACE_S

    def __init__(self, work: Callable[[T], R], jobs: int) -> None:
        self._work, self.room = work, jobs
        self._workers: list[_Worker] = []

    def submit(self, index: int, task: T) -> None:
        worker = next((one for one in self._workers if one.index is None), None) or self._started()
        if not worker.hand(index, task):  # it died while it was idle
            self._workers.remove(worker)
            if not self._started().hand(index, task):
                raise WorkerDiedError("a process ended right after its start; try fewer jobs")

    def ended(self) -> Iterator[Outcome[R]]:
        busy = {worker.pipe: worker for worker in self._workers if worker.index is not None}
        for pipe in wait(list(busy), timeout=PATIENCE_S):
            worker = busy[pipe]  # type: ignore[index]
            outcome: Outcome[R] = worker.outcome()
            if isinstance(outcome.error, WorkerDiedError):
                self._workers.remove(worker)
            yield outcome

    def end(self, *, whole: bool) -> None:
        for worker in self._workers:
            worker.end()

    def _started(self) -> _Worker:
        self._workers.append(_Worker(self._work))
        return self._workers[-1]


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
