"""Interface between a command and the runner: a function `prepare(cfg, composition)` that returns a `Job`.

`prepare` builds everything that a run needs and raises ConfigError for every mistake that the user can
correct. Its config is plain, with interpolations resolved, and has no node `hydra`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

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
