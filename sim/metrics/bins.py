"""Counts of events over time in bins the width of which doubles, so that any run has few of them.

A bin is 2^k s wide, with the same k for all; k follows from the latest event, so bins of several parts of a
run can be merged in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Counts, Times, Window
from sim.metrics.steady import RunInterval, Series

Ints = NDArray[np.int64]

MAX_BINS: Final = 1024
TICKS_PER_S: Final = 1 << 20
_LOG_WIDTH: Final = 14
"""Binary logarithm of the ticks of the narrowest bin by default, 16 ms."""
_EXACT: Final = 2.0**53
"""Sums of integers below this one are exact as doubles."""


class Bins:
    """Counts of events over time, by name, from start_s on; all have the same bins."""

    def __init__(
        self, start_s: float = 0.0, *, max_bins: int = MAX_BINS, log_width: int = _LOG_WIDTH
    ) -> None:
        self.start_s = start_s
        self.log_width = log_width
        self._max_bins = max_bins
        self.sums: dict[str, Ints] = {}

    @property
    def width_s(self) -> float:
        """Returns the width of a bin, in seconds."""
        return (1 << self.log_width) / TICKS_PER_S

    def count(self, name: str, time_s: Times, counts: Counts | Times | None = None) -> None:
        """Counts events at times from start_s on; NaN is left out.

        counts: whole numbers of events at each time, not negative; None: one.
        """
        chosen = time_s >= self.start_s
        if not chosen.all():
            time_s, counts = time_s[chosen], None if counts is None else counts[chosen]
        if not len(time_s):
            return
        ticks = self._ticks(time_s)
        self._reach(int(ticks.max()))
        self._add(name, _exact_sums(ticks >> self.log_width, counts))

    def merge(self, other: Bins) -> None:
        """Adds the bins of other, which is not changed."""
        self._widen(other.log_width)
        times = self.log_width - other.log_width
        for name, sums in other.sums.items():
            self._add(name, halved(sums, times))

    def of(self, name: str, num_bins: int) -> Ints:
        """Returns the first bins of a sum."""
        return added(self.sums.get(name, np.zeros(0, np.int64)), np.zeros(num_bins, np.int64))[:num_bins]

    def buckets(self, names: Sequence[str], end_s: float, max_buckets: int) -> tuple[Times, dict[str, Ints]]:
        """Returns the middles of about max_buckets intervals up to end_s at most, s, and their counts."""
        joined = max(1, round((end_s - self.start_s) / self.width_s / max_buckets))
        num_buckets = int(max(end_s - self.start_s, 0.0) / self.width_s / joined) + 1
        middle_s: Times = (
            self.start_s + (np.arange(num_buckets, dtype=np.float64) + 0.5) * joined * self.width_s
        )
        every = {name: self.of(name, num_buckets * joined).reshape(-1, joined).sum(axis=1) for name in names}
        return middle_s, every

    def interval(self, name: str, window: Window) -> RunInterval:
        """Computes the interval of the rate of events from the bins that are wholly inside the window."""
        num_bins = int(window.duration_s / self.width_s)
        found = Series(self.of(name, num_bins) / self.width_s).interval()
        if not num_bins:
            return found
        # The interval is put around the rate of the whole window, with the rest of it after the last bin.
        rate = int(self.sums[name].sum()) / window.duration_s if name in self.sums else 0.0
        moved = rate - found.value
        return found._replace(value=rate, low=found.low + moved, high=found.high + moved)

    def _ticks(self, time_s: Times) -> Ints:
        found: Ints = np.floor((time_s - self.start_s) * TICKS_PER_S).astype(np.int64)
        return found

    def _reach(self, last_tick: int) -> None:
        self._widen(log_width_for(last_tick, self._max_bins, self.log_width))

    def _widen(self, log_width: int) -> None:
        times = log_width - self.log_width
        if times > 0:
            self.log_width = log_width
            self.sums = {name: halved(sums, times) for name, sums in self.sums.items()}

    def _add(self, name: str, sums: Ints) -> None:
        self.sums[name] = added(self.sums.get(name, sums[:0]), sums)


def _exact_sums(at: Ints, counts: Counts | Times | None) -> Ints:
    """Returns the sums of whole numbers by bin, even if they exceed those that a double has."""
    sums = np.bincount(at, counts)
    if counts is None or len(at) < 2 or sums.max() < _EXACT:
        return sums.astype(np.int64, copy=False)
    half = len(at) // 2
    return added(_exact_sums(at[:half], counts[:half]), _exact_sums(at[half:], counts[half:]))


def log_width_for(last: int, max_groups: int, least: int = 0) -> int:
    """Returns the smallest k >= least for which groups of 2^k numbers from 0 to last are few enough."""
    return max(least, (last // max_groups).bit_length())


def halved(values: NDArray[np.signedinteger], times: int) -> NDArray[np.signedinteger]:
    """Adds neighbouring rows, the given number of times: n rows become n / 2, rounded up."""
    for _ in range(times):
        if len(values) % 2:
            values = np.concatenate([values, np.zeros_like(values[:1])])
        values = values[::2] + values[1::2]
    return values


def added(one: Ints, other: Ints) -> Ints:
    """Returns the sum of two arrays; the shorter one continues with zeros."""
    if len(one) < len(other):
        one, other = other, one
    found = one.copy()
    found[: len(other)] += other
    return found
