"""Interface between a command and what runs it: a function `prepare(cfg, composition)` that returns a `Job`.

`prepare` builds everything that a run needs and raises ConfigError for every mistake that the user can
correct. Its config is plain, with interpolations resolved, and has no node `hydra`.

The process of a command is here as well: its standard output, its secrets, and its garbage collector.
Standard output may end early, as in `windtunnel simulate | head`; the files are still written. The values of
flags with secrets become environment variables, so that no file of a run has them. Python's cyclic garbage
collector does not run while a command starts: the objects of imported modules and of the composed config stay
to the end, and the collector would walk them again and again: a twentieth of the time of a short run.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from sim.settings.errors import ConfigError

if TYPE_CHECKING:
    from experiments.app.settings.compose import Composition


class Job(Protocol):
    """A run whose settings have been checked and whose parts have been built.

    A job with an attribute `continues` that is true takes a folder with shards of a run that has not ended.
    """

    def run(self, folder: Path) -> None:
        """Runs the command, writes its results into the folder, and prints them.

        What has been found is printed before it is written, so that a full disk does not take it away.
        Raises ConfigError for a wrong setting that is found only during the run, UnsuccessfulError if the
        results are written but are no success, and KeyboardInterrupt after Ctrl-C, once the results so far
        are written. Any other exception is a bug.
        """


Prepare = Callable[[dict[str, Any], "Composition"], Job]


class CannotWriteError(Exception):
    """Raised when results cannot be written, such as on a full disk: the process exits with code 1.

    The message is printed on stderr; what was to be said was printed before.
    """


class UnsuccessfulError(Exception):
    """Raised when the results are written but are no success: the process exits with code 3.

    The message, if there is one, is printed on stderr.
    """


class KeptOutput:
    """A text stream that keeps its first OSError, and from then on discards what is written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Writes the text as far as possible; returns its length."""
        self._tried(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._tried(self._stream.flush)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _tried(self, action: Callable[..., Any], *given: str) -> None:
        try:
            action(*given)
        except OSError as error:
            self.error = self.error or error
            # What is still in the buffer is flushed once more when the interpreter ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


@contextmanager
def output_errors_kept() -> Iterator[KeptOutput]:
    """Puts a `KeptOutput` in the place of sys.stdout, and flushes it at the end."""
    before = sys.stdout
    kept = KeptOutput(before)
    sys.stdout = kept
    try:
        yield kept
    finally:
        kept.flush()
        sys.stdout = before


def without_secrets(words: Sequence[str], variables: Mapping[str, str]) -> list[str]:
    """Returns the words without secret flags, the values of which it puts into the environment.

    variables: environment variable of each flag. Both `--flag VALUE` and `--flag=VALUE` are read. Raises
    ConfigError for a flag without a value.
    """
    kept, rest = [], iter(words)
    for word in rest:
        flag, equals, value = word.partition("=")
        if flag not in variables:
            kept.append(word)
            continue
        value = value if equals else next(rest, "")
        if not value:
            raise ConfigError(f"{flag}: needs a value, as in {flag}=VALUE; or set {variables[flag]}")
        os.environ[variables[flag]] = value
    return kept


def begin_collection() -> None:
    """Enables the collector, if it was disabled for the start; objects that exist by now are left out."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
