"""Distributions and rates of a run as accumulators: all values, or sketches in bounded memory.

`EXACT` keeps all values, by reference to the tables that they come from: percentiles are exact.
`sim.metrics.sketches.SKETCHED` keeps counts in buckets, so the metrics of any run take the same memory and do
not depend on how its records were divided: percentiles have a known error; sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

import numpy as np

from sim.metrics.definitions import Counts, Times, Window, describe, per, weighted_percentile
from sim.metrics.steady import Batched, RunInterval, Series
from sim.metrics.sums import TableTotals, Totals, weighted_sum

SLICES: Final = 320
"""Number of slices of the measured time; the event rates of the slices are the series for batch means."""


class Distribution(Protocol):
    """Values >= 0 with their statistics; NaN is ignored."""

    @property
    def count(self) -> int:
        """Returns the number of values."""
        ...

    @property
    def total(self) -> float:
        """Returns the sum of the values."""
        ...

    @property
    def mean(self) -> float:
        """Returns the mean; NaN without values."""
        ...

    def add(self, values: Times, counts: Counts | None = None) -> None:
        """Adds values. counts: occurrences of each; None: one each."""
        ...

    def merge(self, other: Any) -> None:
        """Adds the values of another one of this kind, which is not changed."""
        ...

    def percentiles(self, q: Sequence[float]) -> Times:
        """Computes the percentiles q (0 to 100); NaN without values."""
        ...

    def count_upto(self, value: float) -> int:
        """Returns the number of values that are at most `value`.

        A sketch counts the complete bucket of `value`.
        """
        ...

    def describe(self) -> dict[str, float | int]:
        """Returns the statistics of `sim.metrics.definitions.describe`."""
        ...

    def points(self) -> tuple[Times, Counts]:
        """Returns the values and their counts, for a curve of the distribution."""
        ...


class OfRequests(Protocol):
    """Values of requests in order of time: their distribution, and the series for intervals."""

    def add_requests(self, ids: Counts, arrival_s: Times, values: Times) -> None:
        """Adds one value per request, by ascending id, ignoring NaN."""
        ...

    def merge(self, other: Any) -> None:
        """Adds the values of another one of this kind, which is not changed."""
        ...

    def series(self) -> Batched:
        """Returns the values in order of arrival, for intervals by batch means."""
        ...


class Latency(Distribution, OfRequests, Protocol):
    """A latency of requests."""


class Rates(Protocol):
    """Times of events by name."""

    def count(self, name: str, time_s: Times, counts: Counts | None = None) -> None:
        """Counts events, ignoring NaN. counts: events at each time; None: one."""
        ...

    def merge(self, other: Any) -> None:
        """Adds the events of another one of this kind, which is not changed."""
        ...

    def interval(self, name: str, window: Window) -> RunInterval:
        """Computes the interval of the rate of events in the window."""
        ...


class Values:
    """All values: see `Distribution`."""

    def __init__(self) -> None:
        self._parts: list[tuple[Times, Counts | None]] = []

    def add(self, values: Times, counts: Counts | None = None) -> None:
        self._parts.append((values, counts))

    def merge(self, other: Values) -> None:
        self._parts += other._parts

    @property
    def count(self) -> int:
        return int(self.points()[1].sum())

    @property
    def total(self) -> float:
        return weighted_sum(*self.points())

    @property
    def mean(self) -> float:
        return per(self.total, self.count)

    def percentiles(self, q: Sequence[float]) -> Times:
        return weighted_percentile(*self.points(), q)

    def count_upto(self, value: float) -> int:
        values, counts = self.points()
        return int(counts[values <= value].sum())

    def describe(self) -> dict[str, float | int]:
        return describe(*self._joined())

    def points(self) -> tuple[Times, Counts]:
        values, counts = self._joined()
        happened = ~np.isnan(values)
        if counts is None:
            return values[happened], np.ones(int(happened.sum()), np.int64)
        happened &= counts > 0
        return values[happened], counts[happened]

    def _joined(self) -> tuple[Times, Counts | None]:
        """Returns all values, without copying them if they were added at once."""
        if len(self._parts) == 1:
            return self._parts[0]
        values = joined([values for values, _ in self._parts])
        if all(counts is None for _, counts in self._parts):
            return values, None
        each = [np.ones(len(of), np.int64) if counts is None else counts for of, counts in self._parts]
        return values, np.concatenate(each)


class LatencyValues(Values):
    """All values of requests: see `Latency`."""

    def __init__(self) -> None:
        super().__init__()
        self._arrivals: list[Times] = []

    def add_requests(self, ids: Counts, arrival_s: Times, values: Times) -> None:
        self.add(values)
        self._arrivals.append(arrival_s)

    def merge(self, other: Values) -> None:
        super().merge(other)
        assert isinstance(other, LatencyValues)
        self._arrivals += other._arrivals

    def series(self) -> Series:
        order = np.argsort(joined(self._arrivals), kind="stable")
        return Series(self._joined()[0][order])


class EventTimes:
    """All times of events: see `Rates`. The rates in `SLICES` slices of the window are the series."""

    def __init__(self, start_s: float) -> None:
        self._times: dict[str, list[tuple[Times, Counts | None]]] = {}

    def count(self, name: str, time_s: Times, counts: Counts | None = None) -> None:
        self._times.setdefault(name, []).append((time_s, counts))

    def merge(self, other: EventTimes) -> None:
        for name, times in other._times.items():
            self._times.setdefault(name, []).extend(times)

    def interval(self, name: str, window: Window) -> RunInterval:
        if window.duration_s <= 0:
            return Series(np.empty(0)).interval()
        found = np.zeros(SLICES)
        for time_s, counts in self._times.get(name, ()):
            # NaN (events that did not happen) and times outside the window fall into no slice.
            found += np.histogram(time_s, SLICES, (window.start_s, window.end_s), weights=counts)[0]
        return Series(found * (SLICES / window.duration_s)).interval()


def joined(parts: Sequence[Times]) -> Times:
    """Concatenates arrays, without copying a single one."""
    return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0), *parts])


class Kept(NamedTuple):
    """The building blocks of accumulators."""

    totals: Callable[[], Totals]
    values: Callable[[], Distribution]
    latency: Callable[[], Latency]
    shares: Callable[[], OfRequests]
    """Makes a mean of values that are 0 or 1 for each request, such as an SLO attainment."""
    rates: Callable[[float], Rates]
    """Made with the start of the measured part, s."""
    error: float = 0.0
    """Largest relative error of a percentile."""

    @property
    def is_exact(self) -> bool:
        """Returns whether all values are kept, so the records arrive at once and no row is held back."""
        return not self.error


EXACT: Final = Kept(TableTotals, Values, LatencyValues, LatencyValues, EventTimes)
