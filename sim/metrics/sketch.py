"""A sketch of a distribution: percentiles with a known relative error, in bounded memory.

As in DDSketch, values are counted in buckets the borders of which grow geometrically; counts are integers, so
merging is exact in any order. Source: Masson, Rim and Lee, DDSketch, VLDB 2019. The borders are those of its
linearly interpolated mapping: each octave [2^e, 2^(e+1)) has 1,024 buckets of equal width, so the bucket of a
double is its leading bits and needs no logarithm.

    error of a percentile <= 2^-11 = 0.049 % of its value

A percentile is interpolated between two values as in numpy, and each of the two is estimated by the middle of
its bucket. Values below 2^-40 s (1 ps) count as 0. Count, mean, minimum and maximum are exact.

The packages `ddsketch` (pure Python, one value at a time) and `datasketches` (KLL and t-digest: no weights,
and merging depends on the order) do not fit: gaps between tokens come as values with counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import PERCENTILES, Counts, Times, description
from sim.metrics.sums import ExactTotals

OCTAVE_BITS: Final = 10
"""Binary logarithm of the number of buckets of an octave."""
PERCENTILE_ERROR: Final = 2.0 ** -(OCTAVE_BITS + 1)
"""Largest relative error of a percentile."""
_SHIFT: Final = 52 - OCTAVE_BITS
_LEAST: Final = int(np.float64(2.0**-40).view(np.int64)) >> _SHIFT
"""Bucket of the smallest value that is not counted as 0; that of 0 is the one before."""


class Sketch:
    """Counts of non-negative values in buckets, with their exact count, sum, minimum and maximum."""

    def __init__(self) -> None:
        self.first = 0
        """Number of the bucket that the first count belongs to."""
        self.counts: NDArray[np.int64] = np.zeros(0, np.int64)
        self.totals = ExactTotals()
        self.least = np.inf
        self.largest = -np.inf

    def add(self, values: Times, counts: Counts | None = None) -> None:
        """Adds values; NaN values are left out. counts: occurrences of each value; None: one each.

        Raises ValueError for a negative value.
        """
        happened = ~np.isnan(values)
        if counts is not None:
            happened &= counts > 0
        if not happened.all():
            values, counts = values[happened], counts if counts is None else counts[happened]
        if not len(values):
            return
        least = float(values.min()) + 0.0  # -0.0 becomes 0.0
        if least < 0:
            raise ValueError(f"{least:g}: a sketch takes values >= 0 only")
        self.least, self.largest = min(self.least, least), max(self.largest, float(values.max()))
        buckets = bucket_of(values)
        first = int(buckets.min())
        found = np.bincount(buckets - first, weights=counts)
        self._add_counts(first, found.astype(np.int64))
        self.totals.add("sum", values if counts is None else values * counts)

    def merge(self, other: Sketch) -> None:
        """Adds the counts of other, which is not changed."""
        self._add_counts(other.first, other.counts)
        self.totals.merge(other.totals)
        self.least, self.largest = min(self.least, other.least), max(self.largest, other.largest)

    def _add_counts(self, first: int, counts: NDArray[np.int64]) -> None:
        if not len(counts):
            return
        if not len(self.counts):
            self.first = first
        begin = min(self.first, first)
        end = max(self.first + len(self.counts), first + len(counts))
        if end - begin != len(self.counts):
            grown = np.zeros(end - begin, np.int64)
            grown[self.first - begin : self.first - begin + len(self.counts)] = self.counts
            self.first, self.counts = begin, grown
        self.counts[first - begin : first - begin + len(counts)] += counts

    @property
    def count(self) -> int:
        """Number of the values."""
        return int(self.counts.sum())

    @property
    def total(self) -> float:
        """Sum of the values."""
        return self.totals["sum"]

    @property
    def mean(self) -> float:
        """Mean of the values; NaN without values."""
        count = self.count
        return self.total / count if count else float("nan")

    def percentiles(self, q: Sequence[float]) -> Times:
        """Computes the percentiles q (0 to 100), see `weighted_percentile`; NaN without values."""
        count = self.count
        if not count:
            return np.full(len(q), np.nan)
        last_position = np.cumsum(self.counts) - 1
        position = (count - 1) * (np.asarray(q, dtype=np.float64) / 100)
        below = np.floor(position)
        low, high = (
            self._estimates(np.searchsorted(last_position, place))
            for place in (below, np.minimum(below + 1, count - 1))
        )
        # The first and the last value are known.
        low = np.where(below <= 0, self.least, low)
        high = np.where(below + 1 >= count - 1, self.largest, high)
        low = np.where(below >= count - 1, self.largest, low)
        found: Times = low + (high - low) * (position - below)
        return found

    def count_upto(self, value: float) -> int:
        """Returns the number of values in buckets up to the one of a value >= 0."""
        end = int(bucket_of(np.array([value]))[0]) - self.first + 1
        return int(self.counts[: max(end, 0)].sum())

    def describe(self) -> dict[str, float | int]:
        """Returns the statistics that `sim.metrics.definitions.describe` computes."""
        return description(
            self.count,
            self.mean,
            self.percentiles(PERCENTILES),
            self.least if self.count else float("nan"),
            self.largest if self.count else float("nan"),
        )

    def points(self) -> tuple[Times, Counts]:
        """Returns a value for each bucket that is not empty, in ascending order, and its count."""
        at = np.flatnonzero(self.counts)
        return self._estimates(at), self.counts[at]

    def _estimates(self, index: NDArray[Any]) -> Times:
        """Returns the middles of buckets, not below the minimum and not above the maximum."""
        found: Times = np.clip(middle_of(self.first + index), self.least, self.largest)
        return found


def bucket_of(values: Times) -> NDArray[np.int64]:
    """Returns the numbers of the buckets of values >= 0."""
    bits = (np.ascontiguousarray(values, np.float64) + 0.0).view(np.int64)  # -0.0 + 0.0 is 0.0
    found: NDArray[np.int64] = np.maximum(bits >> _SHIFT, _LEAST - 1)
    return found


def middle_of(buckets: NDArray[np.int64]) -> Times:
    """Returns the middles of buckets; 0 for the bucket of 0."""
    bits = (np.asarray(buckets, np.int64) << _SHIFT) + (1 << (_SHIFT - 1))
    found: Times = np.where(buckets < _LEAST, 0.0, bits.view(np.float64))
    return found
