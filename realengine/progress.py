"""Progress bars of an engine's start: loading, compiling, capturing."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import track

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
        begin_s = time.perf_counter()
        if self._shown:
            yield from track(iter(items), what, console=Console(stderr=True), total=len(items))
        else:
            yield from items
        self.seconds[what] = time.perf_counter() - begin_s


QUIET = Progress()
