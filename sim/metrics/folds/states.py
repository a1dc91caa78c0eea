"""Means and maxima of the states of replicas over time, in bins the width of which doubles."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sim.metrics.folds.batches import log_width_for
from sim.metrics.folds.bins import TICKS_PER_S

Floats = NDArray[np.float64]
MAX_BINS: Final = 512
_LOG_WIDTH: Final = 17
"""Binary logarithm of the ticks of the narrowest bin, 125 ms."""


class States:
    """Integrals and maxima of quantities that are constant during an iteration, and 0 between iterations.

    Arrays are [quantities, groups of replicas, bins]. A mean over time is an integral by the width of a bin.
    """

    def __init__(self, num_quantities: int, num_groups: int) -> None:
        self.log_width = _LOG_WIDTH
        self.integrals: Floats = np.zeros((num_quantities, num_groups, 0))
        self.maxima: Floats = np.zeros((num_quantities, num_groups, 0))

    @property
    def width_s(self) -> float:
        """Returns the width of a bin, in seconds."""
        return (1 << self.log_width) / TICKS_PER_S

    def add(
        self, group: NDArray[np.int64], start_s: Floats, duration_s: Floats, values: list[Floats]
    ) -> None:
        """Adds iterations with their group and one value of each quantity."""
        if not len(start_s):
            return
        end_s = start_s + duration_s
        self._widen(log_width_for(int(end_s.max() * TICKS_PER_S), MAX_BINS, _LOG_WIDTH))
        first, last = (np.floor(time_s / self.width_s).astype(np.int64) for time_s in (start_s, end_s))
        self._reach(int(last.max()) + 1)
        num_bins = self.integrals.shape[2]
        row, bin_, inside_s = np.arange(len(start_s)), first, duration_s
        if (last > first).any():
            row = np.repeat(row, last - first + 1)
            begins = np.cumsum(last - first + 1) - (last - first + 1)
            bin_ = first[row] + np.arange(len(row)) - begins[row]
            low, high = bin_ * self.width_s, (bin_ + 1) * self.width_s
            inside_s = np.maximum(np.minimum(end_s[row], high) - np.maximum(start_s[row], low), 0.0)
        key = group[row] * num_bins + bin_
        starts = np.flatnonzero(np.diff(key, prepend=-1))  # iterations of a replica follow each other
        at = key[starts]
        for quantity, value in enumerate(values):
            own = value[row]
            sums = np.bincount(at, np.add.reduceat(own * inside_s, starts), self.integrals[quantity].size)
            self.integrals[quantity] += sums.reshape(self.integrals[quantity].shape)
            highest = self.maxima[quantity].reshape(-1)
            np.maximum.at(highest, at, np.maximum.reduceat(own, starts))
            self.maxima[quantity] = highest.reshape(self.maxima[quantity].shape)

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
