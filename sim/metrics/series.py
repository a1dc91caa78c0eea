"""Data series in bounded memory: events and states over time, samples of points, distributions as curves.

A plot of a million iterations would be 30 MB, too much for a browser. The means over time are exact integrals
and the maxima are kept as well, so the reduction hides no spikes. Bins are 2^k s wide, with the same k for
all of a series; k follows from the latest event, so bins of several parts of a run can be merged in any
order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Counts, Times, Window, times
from sim.metrics.steady import RunInterval, Series
from sim.records.table import AnyTable, Table, column

Ints = NDArray[np.int64]


Floats = NDArray[np.float64]


def mean_and_max_over_time(
    start_s: Times, duration_s: Times, value: Times, edges_s: Times
) -> tuple[Times, Times]:
    """Computes the mean over time and the maximum of a quantity in each bucket between edges_s.

    The quantity is `value[i]` from start_s[i] for duration_s[i] seconds and 0 in between (idle); the
    intervals are sorted and do not overlap. Both results have one value per bucket.
    """
    width_s = np.diff(edges_s)
    if len(start_s) == 0:
        return np.zeros_like(width_s), np.zeros_like(width_s)
    end_s = start_s + duration_s
    # The integral up to time t is linear between these knots; rounding errors must not put them out of order.
    knots_s = np.maximum.accumulate(np.column_stack((start_s, end_s)).ravel())
    upto_end = np.cumsum(value * duration_s)
    integral = np.column_stack((np.concatenate(([0.0], upto_end[:-1])), upto_end)).ravel()
    mean = np.diff(np.interp(edges_s, knots_s, integral)) / width_s

    first = np.searchsorted(end_s, edges_s[:-1], side="right")
    behind = np.searchsorted(start_s, edges_s[1:], side="left")
    borders = np.column_stack((first, np.maximum(behind, first))).ravel()
    highest = np.maximum.reduceat(np.append(value, 0.0), borders)[::2]
    return mean, np.where(behind > first, highest, 0.0)


def cdf_points(values: Times, counts: Counts | None = None, *, max_points: int = 600) -> tuple[Times, Times]:
    """Computes the points (value, share of values <= it) of the CDF, ignoring NaN.

    Up to max_points values all become points. Of more values, half of the points are at evenly spaced shares,
    and half at shares that approach 1 geometrically, so that p99.9 is as visible as the median.
    """
    if counts is None:
        counts = np.ones(values.shape, dtype=np.int64)
    happened = ~np.isnan(values) & (counts > 0)
    values, counts = values[happened], counts[happened]
    order = np.argsort(values)
    values, upto = values[order], np.cumsum(counts[order])
    if len(values) == 0:
        return values, np.zeros(0)
    picked = np.arange(len(values))
    if len(values) > max_points:
        even = np.linspace(0, 1, max_points // 2)
        tail = 1 - np.geomspace(1, 1 / upto[-1], max_points // 2)
        wanted = np.concatenate((even, tail, [1.0])) * upto[-1]
        picked = np.unique(np.minimum(np.searchsorted(upto, wanted), len(values) - 1))
    return values[picked], upto[picked] / upto[-1]


def octave_of(lengths: NDArray[np.int64]) -> NDArray[np.int8]:
    """Returns the octave k of each length, from 2^k to 2^(k+1) - 1; lengths below 1 count as 1."""
    exponent: NDArray[np.int8] = (np.frexp(np.maximum(lengths, 1).astype(np.float64))[1] - 1).astype(np.int8)
    return exponent


def octaves(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Groups lengths by octaves [1, 2), [2, 4), [4, 8)...

    Returns the lower ends of the octaves that occur and, for each length, the index of its octave.
    """
    occurring, index = np.unique(octave_of(lengths), return_inverse=True)
    return np.left_shift(np.int64(1), occurring.astype(np.int64)), index


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
        """Counts events at times from start_s on, ignoring NaN.

        counts: non-negative integers, the events at each time; None: one.
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
        """Returns the midpoints of about max_buckets intervals up to at most end_s, s, and their counts."""
        joined = max(1, round((end_s - self.start_s) / self.width_s / max_buckets))
        num_buckets = int(max(end_s - self.start_s, 0.0) / self.width_s / joined) + 1
        middle_s: Times = (
            self.start_s + (np.arange(num_buckets, dtype=np.float64) + 0.5) * joined * self.width_s
        )
        every = {name: self.of(name, num_buckets * joined).reshape(-1, joined).sum(axis=1) for name in names}
        return middle_s, every

    def interval(self, name: str, window: Window) -> RunInterval:
        """Computes the interval of the rate of events from the bins completely inside the window."""
        num_bins = int(window.duration_s / self.width_s)
        found = Series(self.of(name, num_bins) / self.width_s).interval()
        if not num_bins:
            return found
        # The interval is centred on the rate of the whole window, including its rest after the last bin.
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
    """Returns exact sums of integers by bin, even beyond the integers of a double."""
    sums = np.bincount(at, counts)
    if counts is None or len(at) < 2 or sums.max() < _EXACT:
        return sums.astype(np.int64, copy=False)
    half = len(at) // 2
    return added(_exact_sums(at[:half], counts[:half]), _exact_sums(at[half:], counts[half:]))


def log_width_for(last: int, max_groups: int, least: int = 0) -> int:
    """Returns the smallest k >= least for which groups of 2^k numbers from 0 to last are few enough."""
    return max(least, (last // max_groups).bit_length())


def halved(values: NDArray[np.signedinteger], times: int) -> NDArray[np.signedinteger]:
    """Adds pairs of neighbouring rows, the given number of times: n rows become n / 2, rounded up."""
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


MAX_STATE_BINS: Final = 512
_LOG_STATE_WIDTH: Final = 17
"""Binary logarithm of the ticks of the narrowest bin, 125 ms."""


class States:
    """Integrals and maxima of quantities that are constant during an iteration, and 0 between iterations.

    Integrals depend on the division of the iterations only by rounding errors. Arrays are [quantities, groups
    of replicas, bins]. A mean over time is an integral divided by the width of a bin.
    """

    def __init__(self, num_quantities: int, num_groups: int) -> None:
        self.log_width = _LOG_STATE_WIDTH
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

        It is fastest with about ten thousand iterations sorted by replica and time.
        """
        if not len(start_s):
            return
        end_s = start_s + duration_s
        self._widen(log_width_for(int(end_s.max() * TICKS_PER_S), MAX_STATE_BINS, _LOG_STATE_WIDTH))
        per_s = 1 / self.width_s  # a power of two, so the product is exact
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
            # Both arrays are contiguous, so these are views of them.
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
    """Returns pairs of neighbouring bins, [quantities, groups, bins / 2, 2]."""
    if values.shape[2] % 2:
        values = np.concatenate([values, np.zeros((*values.shape[:2], 1))], axis=2)
    return values.reshape(*values.shape[:2], -1, 2)


Block = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[Any], Floats]
"""Kinds, numbers, x and y of points."""
_MAX_WAITING: Final = 8192
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


class Points:
    """At most `max_points` points (x, y): a tenth of them the largest y, the others chosen by their numbers.

    A point is chosen if the product of its number and a constant, modulo 2^64, is among the smallest. The
    sample is therefore spread evenly over consecutive numbers, and samples of parts can be merged.
    """

    def __init__(self, max_points: int) -> None:
        self._num_largest = max_points // 10
        self._num_even = max_points - self._num_largest
        self._even = _no_points()
        self._largest = _no_points()

    def add(self, number: NDArray[np.int64], x: Floats, y: Floats) -> None:
        """Adds points; their numbers differ from those of all others."""
        self._take(place_of(number), x, y)

    @property
    def limits(self) -> tuple[np.uint64, float]:
        """Returns the largest place and the smallest y with which a point may still be chosen."""
        place, y = np.uint64(2**64 - 1), -np.inf
        if len(self._even[0]) == self._num_even:
            place = self._even[0][-1]
        if len(self._largest[0]) == self._num_largest:
            y = float(self._largest[2][-1])
        return place, y

    def merge(self, other: Points) -> None:
        """Adds the points of other, which is not changed."""
        for points in (other._even, other._largest):
            self._take(*points)

    def drawn(self) -> tuple[Floats, Floats]:
        """Returns x and y of the chosen points."""
        order, x, y = (np.concatenate(pair) for pair in zip(self._even, self._largest, strict=True))
        _, first = np.unique(order, return_index=True)
        return x[first], y[first]

    def _take(self, order: NDArray[np.uint64], x: Floats, y: Floats) -> None:
        self._even = _least(self._even, (order, x, y), 0, self._num_even)
        self._largest = _least(self._largest, (order, x, y), 2, self._num_largest)


class PointsByKind:
    """Samples of points of several kinds, which are added together; max_points: of each kind."""

    def __init__(self, num_kinds: int, max_points: int) -> None:
        self.kinds = [Points(max_points) for _ in range(num_kinds)]

    def add(self, blocks: Iterable[Block]) -> None:
        """Adds points in blocks of any length."""
        waiting: list[Block] = []
        places, least_y = self._limits()
        for kind, number, x, y in blocks:
            may_be_chosen = (place_of(number) <= places[kind]) | (y >= least_y[kind])
            rows = np.flatnonzero(may_be_chosen)
            waiting.append((kind[rows], number[rows], x[rows], y[rows]))
            if sum(len(block[0]) for block in waiting) > _MAX_WAITING:
                self._take(waiting)
                waiting = []
                places, least_y = self._limits()
        if waiting:
            self._take(waiting)

    def merge(self, other: PointsByKind) -> None:
        """Adds the points of other, which is not changed."""
        for mine, theirs in zip(self.kinds, other.kinds, strict=True):
            mine.merge(theirs)

    def _limits(self) -> tuple[NDArray[np.uint64], Floats]:
        """Returns `Points.limits` of all kinds."""
        places, least_y = zip(*(points.limits for points in self.kinds), strict=True)
        return np.array(places, np.uint64), np.array(least_y)

    def _take(self, blocks: Sequence[Block]) -> None:
        kind, number, x, y = (np.concatenate(each) for each in zip(*blocks, strict=True))
        for index, points in enumerate(self.kinds):
            rows = np.flatnonzero(kind == index)
            if len(rows):
                points.add(number[rows], x[rows].astype(np.float64), y[rows])


def place_of(number: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Returns the places of points in the order in which they are chosen."""
    return number.astype(np.uint64) * _FACTOR


Columns = tuple[NDArray[np.uint64], Floats, Floats]


def _no_points() -> Columns:
    return np.zeros(0, np.uint64), np.zeros(0), np.zeros(0)


def _least(kept: Columns, added: Columns, column: int, num: int) -> Columns:
    """Returns the first `num` points of both by a column, in ascending (0) or descending (2) order."""

    def key(points: Columns) -> NDArray[np.float64] | NDArray[np.uint64]:
        return -points[2] if column else points[0]

    if len(kept[0]) == num:  # most points come after all kept ones
        added = _rows(added, np.flatnonzero(key(added) <= key(kept)[-1]))
    if len(added[0]) > 2 * num:  # a point may occur twice when samples are merged
        added = _rows(added, np.argpartition(key(added), 2 * num)[: 2 * num])
    order, x, y = (np.concatenate(pair) for pair in zip(kept, added, strict=True))
    _, first = np.unique(order, return_index=True)
    order, x, y = order[first], x[first], y[first]
    chosen = np.argsort(key((order, x, y)), kind="stable")[:num]
    return order[chosen], x[chosen], y[chosen]


def _rows(points: Columns, rows: NDArray[np.int64]) -> Columns:
    order, x, y = points
    return order[rows], x[rows], y[rows]


MAX_INTERVALS: Final = 4096
_LOG_INTERVAL: Final = 20
"""Binary logarithm of the ticks of the narrowest interval, 1 s."""

COLUMNS: Final = {
    "arrivals": "i8",  # requests that arrive in the interval
    "prompt_tokens": "i8",  # of these
    "first_tokens": "i8",  # requests that get their first token
    "ttft_s": "f8",  # mean over these
    "ends": "i8",  # requests that end, with any status
    "output_tokens": "i8",  # of these
    "slo_met": "i8",  # requests that end and meet the SLO
    "iterations": "i8",  # iterations that begin in the interval
    "busy_s": "f8",  # their duration, over all replicas
    "running": "f8",  # their sequences times their duration, divided by the length of the interval
    "waiting": "f8",  # likewise, sequences that wait
    "kv_tokens": "f8",  # likewise, tokens with KV
}
"""Columns beside start_s, with their dtypes."""
_STEPS: Final = {
    "ttft_s": 2.0**32,
    "busy_s": 2.0**36,
    "running": 2.0**30,
    "waiting": 2.0**30,
    "kv_tokens": 2.0**20,
}
"""Steps per unit to which values of columns other than counts are rounded; an interval has up to 2^63. Sums
of steps are exact, so they do not depend on the order of the rows or on how a run was divided.
"""
_MEANS: Final = {"running": "running", "waiting": "waiting", "kv_tokens": "kv_tokens_used"}
"""Columns of the table of iterations, by that of the series."""


class LoadSeries:
    """Sums over the rows of requests and iterations, by intervals of simulated time.

    The table is bit-identical for any order and division of the rows. An interval is 1 s long, or 2, 4, 8 s
    ..., so a run has at most `MAX_INTERVALS`. A row counts completely in the interval of its time, even if an
    iteration ends in a later interval.
    """

    def __init__(self) -> None:
        self._bins = Bins(max_bins=MAX_INTERVALS, log_width=_LOG_INTERVAL)

    def add(self, requests: AnyTable, iterations: AnyTable) -> None:
        """Adds rows of requests, with `request_metrics`, and of iterations."""
        count = self._bins.count
        arrival_s, first_s, end_s = (
            times(requests, f"{name}_s") for name in ("arrival", "first_token", "finished")
        )
        count("arrivals", arrival_s)
        count("prompt_tokens", arrival_s, column(requests, "prompt_tokens"))
        count("first_tokens", first_s)
        count("ttft_s", first_s, _steps("ttft_s", times(requests, "ttft_s")))
        count("ends", end_s)
        count("output_tokens", end_s, column(requests, "output_tokens"))
        if "slo_met" in requests:
            count("slo_met", end_s, column(requests, "slo_met", np.int64))
        start_s, duration_s = times(iterations, "start_s"), times(iterations, "duration_s")
        count("iterations", start_s)
        count("busy_s", start_s, _steps("busy_s", duration_s))
        for name, kept in _MEANS.items():
            count(name, start_s, _steps(name, column(iterations, kept) * duration_s))

    def merge(self, other: LoadSeries) -> None:
        """Adds the rows of other, which is not changed."""
        self._bins.merge(other._bins)

    def table(self) -> Table:
        """Returns one row per interval, from the start of the run to the last one with a row."""
        bins = self._bins
        size = max(map(len, bins.sums.values()), default=0)
        whole: dict[str, NDArray[Any]] = {name: bins.of(name, size) for name in COLUMNS}
        for name, steps in _STEPS.items():
            whole[name] = whole[name] / steps
        with np.errstate(invalid="ignore", divide="ignore"):
            whole["ttft_s"] = whole["ttft_s"] / whole["first_tokens"]
        for name in _MEANS:
            whole[name] = whole[name] / bins.width_s
        return Table({"start_s": np.arange(size) * bins.width_s, **whole})


def _steps(name: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the values of a column in its steps, as integers."""
    return np.rint(values * _STEPS[name])
