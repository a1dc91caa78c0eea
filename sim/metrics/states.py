"""Means and maxima of the states of replicas over time, in bins the width of which doubles."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sim.metrics.bins import TICKS_PER_S, log_width_for

Floats = NDArray[np.float64]
MAX_BINS: Final = 512
_LOG_WIDTH: Final = 17
"""Binary logarithm of the ticks of the narrowest bin, 125 ms."""


class States:
    """Integrals and maxima of quantities that are constant during an iteration, and 0 between iterations.

    Integrals depend on how the iterations were divided, by rounding errors only.

    Arrays are [quantities, groups of replicas, bins]. A mean over time is an integral by the width of a bin.
    """

    def __init__(self, num_quantities: int, num_groups: int) -> None:
        self.log_width = _LOG_WIDTH
        self.integrals: Floats = np.zeros((num_quantities, num_groups, 0))
        self.maxima: Floats = np.zeros((num_quantities, num_groups, 0))

    @property
    def num_bins(self) -> int:
        """Returns the number of bins."""
        return int(self.integrals.shape[2])

    @property
    def width_s(self) -> float:
        """Returns the width of a bin, in seconds."""
        return (1 << self.log_width) / TICKS_PER_S

    def add(
        self, group: NDArray[np.int64], start_s: Floats, duration_s: Floats, values: list[NDArray[Any]]
    ) -> None:
        """Adds iterations with their group and one value of each quantity.

        It is quickest with some ten thousand iterations that are sorted by replica and time.
        """
        if not len(start_s):
            return
        end_s = start_s + duration_s
        self._widen(log_width_for(int(end_s.max() * TICKS_PER_S), MAX_BINS, _LOG_WIDTH))
        per_s = 1 / self.width_s  # a power of two, so that the product is exact
        first, last = (start_s * per_s).astype(np.int64), (end_s * per_s).astype(np.int64)
        self._reach(int(last.max()) + 1)
        key = group * self.integrals.shape[2] + first
        longer = np.flatnonzero(last > first)
        inside_s, rest_s = duration_s, end_s[longer]
        if len(longer):
            inside_s = duration_s.copy()
            inside_s[longer] = (first[longer] + 1) * self.width_s - start_s[longer]
        starts = np.flatnonzero(key[1:] != key[:-1]) + 1  # iterations of a replica follow each other
        starts = np.concatenate([[0], starts])
        self._add_sums(
            key[starts],
            [np.add.reduceat(value * inside_s, starts) for value in values],
            [np.maximum.reduceat(value, starts) for value in values],
        )
        if len(longer):  # the seconds in the bins after the first
            num = (last - first)[longer]
            row = np.repeat(np.arange(len(longer)), num)
            later = np.arange(len(row)) - np.repeat(np.cumsum(num) - num, num) + 1
            low_s = (first[longer][row] + later) * self.width_s
            seconds = np.minimum(rest_s[row] - low_s, self.width_s)
            own = [value[longer][row] for value in values]
            self._add_sums(key[longer][row] + later, [value * seconds for value in own], own)

    def _add_sums(self, at: NDArray[np.int64], sums: list[Floats], highest: list[NDArray[Any]]) -> None:
        """Adds to the integrals, and raises the maxima, at the places group * bins + bin."""
        for quantity, (each, high) in enumerate(zip(sums, highest, strict=True)):
            # Both arrays are contiguous, so that these are views of them.
            np.add.at(self.integrals[quantity].reshape(-1), at, each)
            np.maximum.at(self.maxima[quantity].reshape(-1), at, high.astype(np.float64))

    def merge(self, other: States) -> None:
        """Adds the iterations of other, which is not changed."""
        self._widen(other.log_width)
        integrals, maxima = other.integrals, other.maxima
        for _ in range(self.log_width - other.log_width):
            integrals, maxima = _paired(integrals).sum(axis=3), _paired(maxima).max(axis=3)
        num_bins = integrals.shape[2]
        self._reach(num_bins)
        self.integrals[:, :, :num_bins] += integrals
        np.maximum(self.maxima[:, :, :num_bins], maxima, out=self.maxima[:, :, :num_bins])

    def _widen(self, log_width: int) -> None:
        while self.log_width < log_width:
            self.log_width += 1
            self.integrals = _paired(self.integrals).sum(axis=3)
            self.maxima = _paired(self.maxima).max(axis=3)

    def _reach(self, num_bins: int) -> None:
        missing = num_bins - self.integrals.shape[2]
        if missing > 0:
            more = np.zeros((*self.integrals.shape[:2], missing))
            self.integrals = np.concatenate([self.integrals, more], axis=2)
            self.maxima = np.concatenate([self.maxima, more], axis=2)


def _paired(values: Floats) -> Floats:
    """Returns neighbouring bins beside each other, [quantities, groups, bins / 2, 2]."""
    if values.shape[2] % 2:
        values = np.concatenate([values, np.zeros((*values.shape[:2], 1))], axis=2)
    return values.reshape(*values.shape[:2], -1, 2)
