"""Curves over time in bins the width of which doubles, so that a run of any length has a few hundred bins.

Counts and integrals are integers: a time is rounded to 2^-20 s (1 us), and what is in a bin is then added
exactly, in any order. An integral may have up to 9e12 unit-seconds per bin, such as a million KV blocks on
10,000 replicas for 15 minutes.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Counts, Times
from sim.metrics.folds.batches import Ints, added, halved, log_width_for

MAX_BINS: Final = 1024
TICKS_PER_S: Final = 1 << 20
_LOG_WIDTH: Final = 14
"""Binary logarithm of the ticks of the narrowest bin, 16 ms."""


class Bins:
    """Counts, integrals and maxima over time, by name, from start_s on; all have the same bins."""

    def __init__(self, start_s: float = 0.0) -> None:
        self.start_s = start_s
        self.log_width = _LOG_WIDTH
        self.sums: dict[str, Ints] = {}
        self.maxima: dict[str, Ints] = {}

    @property
    def width_s(self) -> float:
        """Width of a bin, s."""
        return (1 << self.log_width) / TICKS_PER_S

    def count(self, name: str, time_s: Times, counts: Counts | None = None) -> None:
        """Counts events at times from start_s on; NaN is left out. counts: events at each; None: one."""
        chosen = time_s >= self.start_s
        if not chosen.all():
            time_s, counts = time_s[chosen], None if counts is None else counts[chosen]
        if not len(time_s):
            return
        ticks = self._ticks(time_s)
        self._reach(int(ticks.max()))
        found = np.bincount(ticks >> self.log_width, weights=counts)
        self._add(name, found.astype(np.int64))

    def integrate(self, start_s: Times, end_s: Times, values: dict[str, NDArray[np.signedinteger]]) -> None:
        """Adds integrals over time of integers from start_s to end_s, and raises the maxima to them."""
        if not len(start_s):
            return
        start, end = self._ticks(start_s), self._ticks(end_s)
        self._reach(int(end.max()))
        first = start >> self.log_width
        last = np.maximum(end - 1, start) >> self.log_width
        row = np.arange(len(start))
        if (last > first).any():  # one row for each bin that an interval reaches
            num = last - first + 1
            row = np.repeat(row, num)
            first = first[row] + np.arange(len(row)) - np.repeat(np.cumsum(num) - num, num)
        low = np.maximum(start[row], first << self.log_width)
        ticks = np.minimum(end[row], (first + 1) << self.log_width) - low
        order = np.argsort(first, kind="stable")
        first, row, ticks = first[order], row[order], ticks[order]
        begins = np.flatnonzero(np.diff(first, prepend=-1))
        for name, column in values.items():
            of_rows = column.astype(np.int64)[row]
            sums, highest = np.zeros(int(first[-1]) + 1, np.int64), np.zeros(int(first[-1]) + 1, np.int64)
            sums[first[begins]] = np.add.reduceat(of_rows * ticks, begins)
            highest[first[begins]] = np.maximum.reduceat(of_rows, begins)
            self._add(name, sums)
            self._raise(name, highest)

    def merge(self, other: Bins) -> None:
        """Adds the bins of other, which is not changed."""
        self._widen(other.log_width)
        times = self.log_width - other.log_width
        for name, sums in other.sums.items():
            self._add(name, halved(sums, times))
        for name, highest in other.maxima.items():
            self._raise(name, highest_of_two(highest, times))

    def of(self, name: str, num_bins: int) -> Ints:
        """Returns the first bins of a sum."""
        return added(self.sums.get(name, np.zeros(0, np.int64)), np.zeros(num_bins, np.int64))[:num_bins]

    def highest(self, name: str, num_bins: int) -> Ints:
        """Returns the first bins of a maximum."""
        return added(self.maxima.get(name, np.zeros(0, np.int64)), np.zeros(num_bins, np.int64))[:num_bins]

    def _ticks(self, time_s: Times) -> Ints:
        found: Ints = np.floor((time_s - self.start_s) * TICKS_PER_S).astype(np.int64)
        return found

    def _reach(self, last_tick: int) -> None:
        self._widen(log_width_for(last_tick, MAX_BINS, _LOG_WIDTH))

    def _widen(self, log_width: int) -> None:
        times = log_width - self.log_width
        if times > 0:
            self.log_width = log_width
            self.sums = {name: halved(sums, times) for name, sums in self.sums.items()}
            self.maxima = {name: highest_of_two(one, times) for name, one in self.maxima.items()}

    def _add(self, name: str, sums: Ints) -> None:
        self.sums[name] = added(self.sums.get(name, sums[:0]), sums)

    def _raise(self, name: str, highest: Ints) -> None:
        one, other = self.maxima.get(name, highest[:0]), highest
        if len(one) < len(other):
            one, other = other, one
        self.maxima[name] = one.copy()
        np.maximum(one[: len(other)], other, out=self.maxima[name][: len(other)])


def highest_of_two(values: Ints, times: int) -> Ints:
    """Returns the larger of two neighbouring values, the given number of times."""
    for _ in range(times):
        if len(values) % 2:
            values = np.append(values, 0)
        values = np.maximum(values[::2], values[1::2])
    return values
