"""What becomes of a task, wherever it ran."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from sim.engine.interrupt import Interrupt
from sim.settings.errors import ConfigError


class Task(Protocol):
    """What a worker is handed; it can be pickled."""

    @property
    def name(self) -> str:
        """For messages: arm paged, seed 3."""
        ...


T = TypeVar("T", bound=Task)
R = TypeVar("R")


class WorkerDiedError(ConfigError):
    """The process that ran a task was killed; what it did is lost."""


class CannotLaunchError(ConfigError):
    """There is no such place to run tasks: a package is missing, or nobody answers."""


class CutShortError(Exception):
    """The work ended early, by Ctrl-C: what it has is no result."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[R]):
    """Of the task at `index`: what the work made of it, or what it raised."""

    index: int
    result: R | None
    error: Exception | None


class Launcher(Protocol):
    """Where tasks run."""

    def outcomes(
        self, work: Callable[[T], R], tasks: Sequence[T], interrupt: Interrupt
    ) -> Generator[Outcome[R], None, None]:
        """Of each task, as they are done; none begins once Ctrl-C is noted, and those under way are awaited.

        `work`, tasks and results are pickled where they run elsewhere. Closing the generator ends all work.
        Raises CannotLaunchError for a place where nothing can run.
        """
        ...


def attempt(work: Callable[[T], R], task: T) -> tuple[R | None, Exception | None]:
    """In a worker: the result or the exception, which keeps its traceback as a note, and can be pickled."""
    try:
        return work(task), None
    except KeyboardInterrupt:
        return None, CutShortError()
    except SystemExit as stop:
        return None, exited(stop)
    except Exception as error:
        if not isinstance(error, ConfigError):
            error.add_note(f"in a worker, {task.name}:\n{traceback.format_exc()}")
        return None, _picklable(error)


def exited(stop: SystemExit) -> RuntimeError:
    """A policy of the user's that calls sys.exit ends its own run, and no other: its traceback is a note."""
    error = RuntimeError(f"the run called sys.exit({'' if stop.code is None else repr(stop.code)})")
    error.add_note("".join(traceback.format_exception(stop)))
    return error


def _picklable(error: Exception) -> Exception:
    """The error without its causes, which a message may not keep; in words if it cannot travel."""
    try:
        # Made in this very line.
        copy: Any = pickle.loads(pickle.dumps(error))  # nosec B301
    except Exception:
        copy = None
    if isinstance(copy, Exception):
        return copy
    plain = RuntimeError(f"{type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        plain.add_note(note)
    return plain
