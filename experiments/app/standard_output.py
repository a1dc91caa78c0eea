"""Standard output that may end early, as in `windtunnel simulate | head`; the files are still written."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO


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
