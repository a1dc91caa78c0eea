"""Progress bars of an engine's start: loading, compiling, capturing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Protocol, TypeVar

WIDTH = 30
REDRAWN_S = 0.1

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Items(Protocol[T_co]):
    """Things of which the number is known."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[T_co]: ...


class Progress:
    """Draws a bar on stderr for each part of a start, and times it. shown: None: if stderr is a terminal."""

    def __init__(self, shown: bool | None = False) -> None:
        self._shown = sys.stderr.isatty() if shown is None else shown
        self.seconds: dict[str, float] = {}
        """Seconds of each part that is done."""

    def over(self, items: Items[T], what: str) -> Iterator[T]:
        """Yields items, while a bar shows how many are done."""
        begin_s = drawn_s = time.perf_counter()
        total = len(items)
        for num_done, item in enumerate(items):
            if self._shown and (not num_done or time.perf_counter() - drawn_s > REDRAWN_S):
                drawn_s = time.perf_counter()
                _draw(what, num_done, total, drawn_s - begin_s)
            yield item
        self.seconds[what] = time.perf_counter() - begin_s
        if self._shown:
            _draw(what, total, total, self.seconds[what], end="\n")


def _draw(what: str, num_done: int, total: int, seconds: float, end: str = "") -> None:
    filled = WIDTH * num_done // max(total, 1)
    bar = "#" * filled + "." * (WIDTH - filled)
    sys.stderr.write(f"\r{what:26} {bar} {num_done}/{total}  {seconds:.0f} s{end}")
    sys.stderr.flush()


QUIET = Progress()
