"""What a command offers to the runner: a function `prepare(cfg, composition)` that returns a `Job`.

`prepare` builds everything that a run needs and raises ConfigError for whatever a user can mend. Its config
has no node `hydra`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from sim.settings.compose import Composition


class Job(Protocol):
    """A run whose settings have been checked and whose parts have been built."""

    def run(self, folder: Path) -> None:
        """Run, write into the folder, and print.

        Raises ConfigError for a mistake in the settings that shows only now, UnsuccessfulError for a result
        that is written but is no success, and KeyboardInterrupt after Ctrl-C, when what there is is written.
        Any other exception is a bug.
        """


Prepare = Callable[["DictConfig", "Composition"], Job]


class UnsuccessfulError(Exception):
    """The result is written, but something failed in it: the process exits with code 3.

    The message, if there is one, is printed to stderr.
    """
