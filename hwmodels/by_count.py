"""Functions of a count, tabulated on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.float64]
Seconds = NDArray[np.float64]

PIECE = 256


class ByCount:
    """Table of formula(n) for n = 0, 1, ...: a lookup takes 60 ns, a computation up to milliseconds.

    Values are always computed in the same pieces of 256 counts, so that numbers and arrays agree to the last
    bit.
    """

    def __init__(self, formula: Callable[[Counts], Seconds]) -> None:
        self._formula = formula
        self._array = np.empty(0)
        self._list: list[float | None] = []

    def of(self, counts: Any) -> Any:
        """Returns the value at a count, or those at an array of counts."""
        if type(counts) is np.ndarray:
            return self._of_many(counts)
        try:
            known = self._list[counts]
        except IndexError:
            known = None
        return self._computed(counts) if known is None else known

    def _of_many(self, counts: NDArray[np.intp]) -> Seconds:
        try:
            values = self._array.take(counts)
        except IndexError:
            self._reach(int(counts.max(initial=0)))
            values = self._array.take(counts)
        if np.isnan(values).any():
            for piece in np.unique(counts[np.isnan(values)] // PIECE).tolist():
                self._fill(piece)
            values = self._array.take(counts)
        return values

    def _computed(self, count: int) -> float:
        self._reach(count)
        self._fill(count // PIECE)
        return float(self._array[count])

    def _reach(self, count: int) -> None:
        if count >= len(self._list):
            size = max(2 * len(self._list), (count // PIECE + 1) * PIECE)
            added = size - len(self._list)
            self._array = np.concatenate([self._array, np.full(added, np.nan)])
            self._list += [None] * added

    def _fill(self, piece: int) -> None:
        start = piece * PIECE
        values = self._formula(np.arange(start, start + PIECE, dtype=np.float64))
        self._array[start : start + PIECE] = values
        self._list[start : start + PIECE] = values.tolist()
