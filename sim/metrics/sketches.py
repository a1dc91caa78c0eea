"""Accumulators in bounded memory for streaming runs: sketches of distributions, and groups of requests.

As in DDSketch, values are counted in buckets whose borders grow geometrically; counts are integers, so
merging is exact in any order. Source: Masson, Rim and Lee, DDSketch, VLDB 2019. The borders are those of its
linearly interpolated mapping: each octave [2^e, 2^(e+1)) has 1,024 buckets of equal width, so the bucket of a
double is its leading bits and needs no logarithm.

    error of a percentile <= 2^-11 = 0.049 % of its value

A percentile is interpolated between two values as in numpy, and each of the two is estimated by the middle of
its bucket. Values below 2^-40 s (1 ps) count as 0. Count, mean, minimum and maximum are exact.

The packages `ddsketch` (pure Python, one value at a time) and `datasketches` (KLL and t-digest: no weights,
and merging depends on the order) are unsuitable: gaps between tokens come as values with counts.

Groups of requests with consecutive ids serve confidence intervals by batch means. A group has 2^k ids, with
the same k for all; as soon as there would be too many groups, pairs of groups are merged. k therefore follows
from the largest id, and groups of several parts of a run are merged by id. Sums are integers in units of
2^-30 s, so the order of addition does not matter; a unit is 1 ns, far less than the width of an interval.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import PERCENTILES, Counts, Times, description
from sim.metrics.distributions import Kept
from sim.metrics.series import Bins, Ints, added, halved, log_width_for
from sim.metrics.steady import MEAN, Figure, Values, integrated_time
from sim.metrics.sums import ExactTotals

OCTAVE_BITS: Final = 10
"""Binary logarithm of the number of buckets of an octave."""
PERCENTILE_ERROR: Final = 2.0 ** -(OCTAVE_BITS + 1)
"""Largest relative error of a percentile."""
_SHIFT: Final = 52 - OCTAVE_BITS
_LEAST: Final = int(np.float64(2.0**-40).view(np.int64)) >> _SHIFT
"""Bucket of the smallest value that is not counted as 0; the previous bucket is for 0."""


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
        """Adds values, ignoring NaN. counts: occurrences of each value; None: one each.

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
        """Returns the number of values in buckets up to the bucket of a value >= 0."""
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
        """Returns the midpoints of buckets, clamped to the minimum and maximum."""
        found: Times = np.clip(middle_of(self.first + index), self.least, self.largest)
        return found


def bucket_of(values: Times) -> NDArray[np.int64]:
    """Returns the numbers of the buckets of values >= 0."""
    bits = (np.ascontiguousarray(values, np.float64) + 0.0).view(np.int64)  # -0.0 + 0.0 is 0.0
    found: NDArray[np.int64] = np.maximum(bits >> _SHIFT, _LEAST - 1)
    return found


def middle_of(buckets: NDArray[np.int64]) -> Times:
    """Returns the midpoints of buckets; 0 for the bucket of 0."""
    bits = (np.asarray(buckets, np.int64) << _SHIFT) + (1 << (_SHIFT - 1))
    found: Times = np.where(buckets < _LEAST, 0.0, bits.view(np.float64))
    return found


MAX_GROUPS: Final = 4096
MAX_INDICATOR_GROUPS: Final = 2048
"""Maximum number of groups whose distributions are kept as well."""
_UNIT: Final = 2.0**30
_BUCKET_BITS: Final = 2
"""Buckets of a distribution here are 2^2 times as wide as those of `Sketch`: 0.4 %."""
_MIN_PER_BATCH: Final = 4
"""Minimum number of groups per batch."""


class IdGroups:
    """Counts and sums of values by group of ids; pairs of groups are merged as soon as there are too many."""

    def __init__(self) -> None:
        self.log_width = 0
        self.counts: Ints = np.zeros(0, np.int64)
        self.units: Ints = np.zeros(0, np.int64)

    def add(self, ids: Ints, values: Times) -> None:
        """Adds values >= 0 of requests, by ascending id, ignoring NaN."""
        known = ~np.isnan(values)
        ids, values = ids[known], values[known]
        if not len(ids):
            return
        self._reach(int(ids[-1]))
        group = ids >> self.log_width
        starts = np.flatnonzero(np.diff(group, prepend=-1))
        at = group[starts]
        self.counts[at] += np.diff(np.append(starts, len(group)))
        self.units[at] += np.add.reduceat(np.rint(values * _UNIT).astype(np.int64), starts)

    def merge(self, other: IdGroups) -> None:
        """Adds the groups of other, which is not changed."""
        log_width = max(self.log_width, other.log_width)
        for name in ("counts", "units"):
            mine = halved(getattr(self, name), log_width - self.log_width)
            theirs = halved(getattr(other, name), log_width - other.log_width)
            setattr(self, name, added(mine, theirs))
        self.log_width = log_width

    def _reach(self, last_id: int) -> None:
        """Makes room for an id."""
        log_width = max(self.log_width, log_width_for(last_id, MAX_GROUPS))
        num_groups = (last_id >> log_width) + 1
        for name in ("counts", "units"):
            values = halved(getattr(self, name), log_width - self.log_width)
            setattr(self, name, added(values, np.zeros(num_groups, np.int64)))
        self.log_width = log_width

    @property
    def means(self) -> tuple[Values, Ints]:
        """Means of the groups with values, and their numbers of values."""
        some = self.counts > 0
        return self.units[some] / _UNIT / self.counts[some], self.counts[some]


class Distributions:
    """Counts of values by group of ids and bucket of the value, [groups, buckets]."""

    def __init__(self) -> None:
        self.log_width = 0
        self.first = 0
        """Number of the bucket of the first column."""
        self.counts: NDArray[np.int32] = np.zeros((0, 0), np.int32)

    def add(self, ids: Ints, values: Times) -> None:
        """Adds values >= 0 of requests, by ascending id, ignoring NaN."""
        known = ~np.isnan(values)
        ids, values = ids[known], values[known]
        if not len(ids):
            return
        log_width = max(self.log_width, log_width_for(int(ids[-1]), MAX_INDICATOR_GROUPS))
        group, bucket = ids >> log_width, bucket_of(values) >> _BUCKET_BITS
        first, end = int(bucket.min()), int(bucket.max()) + 1
        self._reach(log_width, int(group[-1]) + 1, first, end)
        np.add.at(self.counts, (group, bucket - self.first), 1)

    def __getstate__(self) -> dict[str, Any]:
        """Returns only the counts that are not 0, as most are 0: 1 MB instead of 20 MB in a pickle."""
        at = np.flatnonzero(self.counts)
        found = {"shape": self.counts.shape, "at": at, "not_zero": self.counts.reshape(-1)[at]}
        return {"log_width": self.log_width, "first": self.first, **found}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.log_width, self.first = state["log_width"], state["first"]
        self.counts = np.zeros(state["shape"], np.int32)
        self.counts.reshape(-1)[state["at"]] = state["not_zero"]

    def merge(self, other: Distributions) -> None:
        """Adds the counts of other, which is not changed."""
        if not other.counts.size:
            return
        log_width = max(self.log_width, other.log_width)
        theirs = halved(other.counts, log_width - other.log_width)
        self._reach(log_width, len(theirs), other.first, other.first + theirs.shape[1])
        at = other.first - self.first
        self.counts[: len(theirs), at : at + theirs.shape[1]] += theirs

    def _reach(self, log_width: int, num_groups: int, first: int, end: int) -> None:
        """Extends the arrays for groups of 2^log_width ids and for the buckets from first to end - 1."""
        mine = halved(self.counts, log_width - self.log_width)
        self.log_width = log_width
        if not mine.size:
            self.first, self.counts = first, np.zeros((num_groups, end - first), np.int32)
            return
        begin, stop = min(self.first, first), max(self.first + mine.shape[1], end)
        grown = np.zeros((max(len(mine), num_groups), stop - begin), np.int32)
        at = self.first - begin
        grown[: len(mine), at : at + mine.shape[1]] = mine
        self.first, self.counts = begin, grown


class GroupedSeries:
    """A latency of requests in order of their ids, in groups; see `sim.metrics.steady.Batched`.

    If a percentile lies inside a bucket, the same fraction of the bucket counts in every group. sketch: of
    all values.
    """

    def __init__(self, groups: IdGroups, distributions: Distributions, sketch: Sketch) -> None:
        self._groups, self._distributions, self._sketch = groups, distributions, sketch

    @property
    def count(self) -> int:
        """Returns the number of values of the latency, one per request that has it."""
        return self._sketch.count

    def figure(self, figure: Figure) -> float:
        """Computes the statistic of all values, of which there is at least one."""
        if figure.share is None:
            return self._sketch.mean
        return float(self._sketch.percentiles([100 * figure.share])[0])

    def memory(self, figure: Figure) -> float:
        """Computes the integrated autocorrelation time in values, at least 1."""
        means, _ = self._series(figure)
        return integrated_time(means, self.count / len(means))

    def batch_means(self, figure: Figure, num_batches: int) -> Values | None:
        """Computes the means of batches of about equal length; None if there are too few groups."""
        return means_of_batches(*self._series(figure), num_batches)

    def quantiles(self, shares: tuple[float, float]) -> tuple[float, float]:
        """Computes two quantiles of all values, rounded outwards to the bucket borders of the groups."""
        low, high = self._sketch.percentiles([100 * share for share in shares])
        half = 2.0 ** (_BUCKET_BITS - OCTAVE_BITS - 1)
        return max(float(low) * (1 - half), self._sketch.least), min(
            float(high) * (1 + half), self._sketch.largest
        )

    def _series(self, figure: Figure) -> tuple[Values, Ints]:
        """Returns the mean of each group, of the values or of the indicator of a percentile, and its size."""
        if figure.share is None:
            return self._groups.means
        counts = self._distributions.counts.astype(np.int64)
        upto = counts.sum(axis=0).cumsum()
        wanted = figure.share * int(upto[-1])
        at = min(int(np.searchsorted(upto, wanted)), len(upto) - 1)
        inside = int(upto[at]) - (below := int(upto[at - 1]) if at else 0)
        part = min(max((wanted - below) / inside, 0.0), 1.0) if inside else 0.0
        size = counts.sum(axis=1)
        some = size > 0
        met = counts[some, :at].sum(axis=1) + part * counts[some, at]
        return met / size[some], size[some]


class MetSeries:
    """Shares of requests that met the SLO, in groups of ids; see `sim.metrics.steady.Batched`."""

    def __init__(self, groups: IdGroups) -> None:
        self._means, self._sizes = groups.means

    @property
    def count(self) -> int:
        """Returns the number of requests that arrived in the measured time."""
        return int(self._sizes.sum())

    def figure(self, figure: Figure) -> float:
        """Computes the share of the requests that met the SLO."""
        return float((self._means * self._sizes).sum()) / self.count

    def memory(self, figure: Figure) -> float:
        """Computes the integrated autocorrelation time in requests, at least 1."""
        return integrated_time(self._means, self.count / len(self._means))

    def batch_means(self, figure: Figure, num_batches: int) -> Values | None:
        """Computes the shares of batches of about equal length; None if there are too few groups."""
        return means_of_batches(self._means, self._sizes, num_batches)

    def quantiles(self, shares: tuple[float, float]) -> tuple[float, float]:
        """Computes two quantiles of zeros and ones."""
        missed = 1 - self.figure(MEAN)
        return float(shares[0] > missed), float(shares[1] > missed)


def means_of_batches(means: Values, sizes: Ints, num_batches: int) -> Values | None:
    """Computes the means of batches of consecutive groups with about equal numbers of values."""
    if len(means) < _MIN_PER_BATCH * num_batches:
        return None
    upto = np.cumsum(sizes)
    ends = np.searchsorted(upto, upto[-1] * np.arange(1, num_batches) / num_batches, side="left") + 1
    starts = np.concatenate([[0], ends])
    if (np.diff(np.append(starts, len(means))) < 1).any():
        return None
    found: Values = np.add.reduceat(means * sizes, starts) / np.add.reduceat(sizes, starts)
    return found


class GroupedLatency(Sketch):
    """A latency of requests: its distribution, and groups of requests: see `sim.metrics.distributions`."""

    def __init__(self) -> None:
        super().__init__()
        self.groups, self.distributions = IdGroups(), Distributions()

    def add_requests(self, ids: Ints, arrival_s: Times, values: Times) -> None:
        """Adds values of requests, by ascending id, ignoring NaN."""
        assert (np.diff(ids) > 0).all(), "the requests are not in order of their ids"
        self.add(values)
        self.groups.add(ids, values)
        self.distributions.add(ids, values)

    def merge(self, other: Sketch) -> None:
        """Adds the requests of other, which is not changed."""
        super().merge(other)
        assert isinstance(other, GroupedLatency)
        self.groups.merge(other.groups)
        self.distributions.merge(other.distributions)

    def series(self) -> GroupedSeries:
        """Returns the latency in the order of the requests' ids."""
        return GroupedSeries(self.groups, self.distributions, self)


class GroupedShares(IdGroups):
    """Zeros and ones of requests, in groups of ids."""

    def add_requests(self, ids: Ints, arrival_s: Times, values: Times) -> None:
        """Adds values of requests, by id in ascending order."""
        self.add(ids, values)

    def series(self) -> MetSeries:
        """Returns the shares of ones in the order of the requests' ids."""
        return MetSeries(self)


SKETCHED: Final = Kept(ExactTotals, Sketch, GroupedLatency, GroupedShares, Bins, PERCENTILE_ERROR)
