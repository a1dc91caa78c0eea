"""Outcomes of tasks, whatever process ran them."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from sim.settings.errors import ConfigError


class Task(Protocol):
    """A unit of work for a worker; it can be pickled."""

    @property
    def name(self) -> str:
        """Name in messages: arm paged, seed 3."""
        ...


T = TypeVar("T", bound=Task)
R = TypeVar("R")


class WorkerDiedError(ConfigError):
    """The process that ran a task was killed and its work is lost."""


class CannotLaunchError(ConfigError):
    """Tasks cannot run there: a package is missing, or no cluster responds."""


class CutShortError(Exception):
    """Ctrl-C ended the work early, so its data is no result."""


@dataclass(frozen=True, slots=True)
class Outcome(Generic[R]):
    """Result of the task at `index`, or the exception that it raised."""

    index: int
    result: R | None
    error: Exception | None


def attempt(work: Callable[[T], R], task: T) -> tuple[R | None, Exception | None]:
    """Returns, in a worker, the result or the exception, picklable and with its traceback as a note."""
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
    """Converts sys.exit of a user's policy to an error of its own run, with the traceback as a note."""
    error = RuntimeError(f"the run called sys.exit({'' if stop.code is None else repr(stop.code)})")
    error.add_note("".join(traceback.format_exception(stop)))
    return error


def _picklable(error: Exception) -> Exception:
    """Returns the error without its causes; if it cannot be pickled, a RuntimeError with its text."""
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
