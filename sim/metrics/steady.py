"""Determines the end of the warm-up of one long run and confidence intervals of its metrics.

Warm-up by MSER-5: the values, in order of time, are averaged in groups of five. The best point d at which to
cut the n averages Y minimises the squared standard error of the mean of the rest,

    d* = argmin over 0 <= d <= n / 2 of  sum_{i > d} (Y_i - mean_d)^2 / (n - d)^2

A minimum in the last tenth of these points means that the run did not settle, or is too short to tell.
Source: White, Cobb and Spratt, A comparison of five steady-state truncation heuristics for simulation, Winter
Simulation Conference 2000; the limit n / 2: Hoad, Robinson and Davies, Automating warm-up length estimation,
JORS 61, 2010.

Intervals by batch means: latencies of consecutive requests are autocorrelated, so the interval for
independent values would be far too narrow. The run is cut into b batches of equally many values, each long
compared with the autocorrelation time; with x_j the mean of batch j and x the mean of all,

    h = t(b - 1, 0.975) sqrt(sum_j (x_j - x)^2 / (b (b - 1))) sqrt(1 + 2 m / e)

The interval of a mean is +- h. The interval of a percentile q goes from the quantile q - h to the quantile
q + h, where x_j is the share of the values of batch j up to the percentile; if q + h >= 1, the run is too
short. Source: Law, Simulation Modeling and Analysis, 5th edition, 9.5.3. e is the effective sample size: the
number of values over the integrated autocorrelation time (Geyer, Practical Markov chain Monte Carlo,
Statistical Science 7, 1992: initial monotone sequence); m is its minimum, 50 and 3 / (1 - q). The last factor
is our addition: it widens the interval, because a small number of batches misses rare long busy periods. If
neighbouring batches are still autocorrelated (von Neumann's ratio, one-sided, 5 %), in their means or in
these shares, fewer and longer batches are used; below `MIN_BATCHES` there is no interval.

Measured coverage for waits in M/M/1 (runs of 2,000, 10,000, 50,000 values; % of the runs with an interval; in
brackets, the % of these whose interval contains the true value):

    load   p99                        mean
    0.5    1 (83), 84 (97), 97 (97)   98 (96), 99 (93), 99 (96)
    0.8    0, 0, 45 (92)              38 (83), 97 (96), 99 (95)
    0.9    0, 0, 0                    4 (13), 48 (89), 100 (96)

The few intervals of short runs at high load are therefore unreliable.

The warm-up of a run is determined from the series of TTFT, which reflects the queue, and of TPOT, which
reflects the batch, of the requests in order of arrival. E2E follows from both and varies too much with the
output length.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from sim.metrics.confidence import CONFIDENCE, student_t
from sim.metrics.definitions import PERCENTILES
from sim.records.table import AnyTable, column

Values = NDArray[np.float64]

GROUP = 5  # values per average of MSER-5
MIN_GROUPS = 20  # fewer averages are not enough to find a warm-up
BATCHES = (16, 8)
MIN_BATCHES = BATCHES[-1]
MIN_PER_BATCH = 10
MIN_INDEPENDENT = 50  # smallest effective sample size
MIN_BEYOND = 3  # of the effective sample size, values beyond a percentile
ROUNDING = 1e-13  # rounding error of a zero difference, relative to a sum of squares
_MEMORY_GROUPS = 4096  # maximum number of averages for the autocorrelation, hundreds per batch
NORMAL_5_PERCENT = -1.6448536269514729
"""Quantile 0.05 of the standard normal distribution; 0.05 is the probability of a false "autocorrelated"."""


class WarmUp(NamedTuple):
    """The warm-up of a series: the number of its first values to cut."""

    num_values: int
    is_settled: bool
    """False if the series did not settle, or is too short to tell."""


class Lack(Enum):
    """Reasons why there is no interval."""

    NO_VALUES = "nothing was measured"
    SHORT = "the run is too short"
    DEPENDENT = "batches are autocorrelated"


class RunInterval(NamedTuple):
    """A metric of one run and the bounds of its interval; NaN without an interval, for the reason `lack`."""

    value: float
    low: float
    high: float
    num_batches: int
    lack: Lack | None = None


class Figure(NamedTuple):
    """The statistic of a series: its mean, or, with share, a percentile (0.99 for p99)."""

    share: float | None = None
    min_per_batch: int = MIN_PER_BATCH
    min_independent: float = MIN_INDEPENDENT

    def of(self, values: Values) -> float:
        """Computes the statistic of one or more values."""
        return float(values.mean() if self.share is None else np.percentile(values, 100 * self.share))


MEAN = Figure()


def percentile(q: float) -> Figure:
    """Returns the percentile q, 0 <= q < 100, as a statistic.

    A batch must be long enough to have a value beyond the percentile: 100 values for p99.
    """
    beyond = round(1 / (1 - q / 100), 6)
    return Figure(q / 100, max(MIN_PER_BATCH, math.ceil(beyond)), max(MIN_INDEPENDENT, MIN_BEYOND * beyond))


def warm_up(values: Values) -> WarmUp:
    """Determines the warm-up of values in order of time by MSER-5; averages ignore NaN.

    Equal values have no warm-up. A series of fewer than 100 values is never settled, nor is one with more
    known values before the cut than after it.
    """
    num_groups = len(values) // GROUP
    if num_groups < MIN_GROUPS:
        return WarmUp(0, False)
    groups = _averages(values[: num_groups * GROUP].reshape(num_groups, GROUP))
    if not len(groups):
        return WarmUp(0, False)
    # Sums over what remains when the first d averages are cut; centring keeps rounding errors small.
    centred = groups - groups.mean()
    left = np.arange(num_groups, 0, -1)
    sums, squares = (np.cumsum(part[::-1])[::-1] for part in (centred, centred**2))
    deviation = squares - sums**2 / left
    deviation[deviation <= ROUNDING * squares] = 0.0  # equal values, up to the last bits of the sums
    spread = deviation / left.astype(np.float64) ** 2
    last = num_groups // 2
    best = int(np.argmin(spread[: last + 1]))
    is_known = ~np.isnan(values)
    leaves_half = 2 * is_known[best * GROUP :].sum() >= is_known.sum()
    return WarmUp(best * GROUP, bool(best < last - last // 10 and leaves_half))


class Batched(Protocol):
    """A series of values for which intervals can be computed: in order of time, without NaN."""

    @property
    def count(self) -> int:
        """Returns the number of values, one per request or per slice of time."""
        ...

    def figure(self, figure: Figure) -> float:
        """Computes the statistic of all values, of which there is at least one."""
        ...

    def memory(self, figure: Figure) -> float:
        """Computes the integrated autocorrelation time in values, at least 1.

        For a percentile, it is the time of the indicator that a value is at most the percentile.
        """
        ...

    def batch_means(self, figure: Figure, num_batches: int) -> Values | None:
        """Computes the means of batches of about equal length, of the values or of that indicator.

        None: the series cannot be divided into this many batches.
        """
        ...

    def quantiles(self, shares: tuple[float, float]) -> tuple[float, float]:
        """Computes two quantiles of all values."""
        ...


def interval_of(series: Batched, figure: Figure = MEAN) -> RunInterval:
    """Computes a statistic of a series and its interval by batch means."""
    if not series.count:
        return RunInterval(math.nan, math.nan, math.nan, 0, Lack.NO_VALUES)
    whole = series.figure(figure)
    if series.count < MIN_BATCHES * figure.min_per_batch:
        return RunInterval(whole, math.nan, math.nan, 0, Lack.SHORT)
    memory = series.memory(MEAN) if figure.share is None else max(series.memory(MEAN), series.memory(figure))
    independent = series.count / memory
    if independent < figure.min_independent:
        lack = Lack.DEPENDENT if independent < MIN_INDEPENDENT else Lack.SHORT
        return RunInterval(whole, math.nan, math.nan, 0, lack)
    widened = math.sqrt(1 + 2 * figure.min_independent / independent)
    lack = Lack.SHORT
    for num_batches in BATCHES:
        if series.count < num_batches * figure.min_per_batch:
            continue
        means, of_values = series.batch_means(figure, num_batches), series.batch_means(MEAN, num_batches)
        if means is None or of_values is None:
            continue
        if not (_are_independent(means) and _are_independent(of_values)):
            lack = Lack.DEPENDENT
            continue
        error = float(means.std(ddof=1)) / math.sqrt(num_batches)
        half_width = student_t(num_batches - 1, (1 + CONFIDENCE) / 2) * error * widened
        if figure.share is None:
            return RunInterval(whole, whole - half_width, whole + half_width, num_batches)
        if half_width < min(figure.share, 1 - figure.share):
            low, high = series.quantiles((figure.share - half_width, figure.share + half_width))
            # Rounding errors could put the percentile just outside its interval.
            return RunInterval(whole, min(low, whole), max(high, whole), num_batches)
        lack = Lack.SHORT
    return RunInterval(whole, math.nan, math.nan, 0, lack)


class Series:
    """Values of a run in steady state, in order of time, without NaN; caches data shared by all intervals."""

    def __init__(self, values: Values) -> None:
        self.known = values[~np.isnan(values)]
        self._figures: dict[Figure, float] = {}
        self._means: dict[int, Values] = {}
        self._indicator: tuple[Figure, Values] | None = None

    @property
    def count(self) -> int:
        """Returns the number of values of the series."""
        return len(self.known)

    def interval(self, figure: Figure = MEAN) -> RunInterval:
        """Computes a statistic and its interval by batch means."""
        return interval_of(self, figure)

    def figure(self, figure: Figure) -> float:
        """Computes the statistic of all values, of which there is at least one."""
        if figure not in self._figures:
            self._figures[figure] = figure.of(self.known)
        return self._figures[figure]

    def memory(self, figure: Figure) -> float:
        """Computes the integrated autocorrelation time in values, at least 1."""
        return self._memory if figure.share is None else integrated_time(*_grouped(self._counted(figure)))

    def batch_means(self, figure: Figure, num_batches: int) -> Values:
        """Computes the means of batches, of the values or of the indicator of a percentile."""
        if figure.share is not None:
            return _batch_means(self._counted(figure), num_batches)
        if num_batches not in self._means:
            self._means[num_batches] = _batch_means(self.known, num_batches)
        return self._means[num_batches]

    def quantiles(self, shares: tuple[float, float]) -> tuple[float, float]:
        """Computes two quantiles of all values."""
        low, high = np.percentile(self.known, [100 * share for share in shares])
        return float(low), float(high)

    def _counted(self, figure: Figure) -> Values:
        """Returns 1 for each value that is at most the percentile, else 0."""
        if self._indicator is None or self._indicator[0] != figure:
            self._indicator = figure, (self.known <= self.figure(figure)).astype(np.float64)
        return self._indicator[1]

    @cached_property
    def _memory(self) -> float:
        return integrated_time(*_grouped(self.known))


def _batch_means(values: Values, num_batches: int) -> Values:
    """Computes the means of batches of equal length; excess values at the start are dropped."""
    length = len(values) // num_batches
    means: Values = values[len(values) - num_batches * length :].reshape(num_batches, length).mean(axis=1)
    return means


def _grouped(values: Values) -> tuple[Values, int]:
    """Returns the means of groups of a long series, and the length of a group.

    Integrated autocorrelation times are then at least about that length.
    """
    length = -(-len(values) // _MEMORY_GROUPS)
    return values[len(values) % length :].reshape(-1, length).mean(axis=1), length


def integrated_time(groups: Values, length: float) -> float:
    """Computes the integrated autocorrelation time, in values, at least 1.

    groups: means of groups of about equal length.
    """
    num = len(groups)
    products = np.abs(np.fft.rfft(groups - groups.mean(), 2 * num)) ** 2
    covariances = np.fft.irfft(products, 2 * num)[:num]
    if covariances[0] <= 0:
        return 1.0
    pairs = covariances[: num // 2 * 2].reshape(-1, 2).sum(axis=1) / covariances[0]
    ends = np.flatnonzero(pairs <= 0)
    before = pairs[: ends[0]] if len(ends) else pairs
    return max(1.0, length * (2 * float(np.minimum.accumulate(before).sum()) - 1))


def _averages(groups: NDArray[np.float64]) -> Values:
    """Computes the mean of each row without NaN; an empty row takes the mean of the nearest row before it.

    Empty rows at the beginning take the first mean. Returns an empty array if all rows are empty.
    """
    known = ~np.isnan(groups)
    counts = known.sum(axis=1)
    if not counts.any():
        return np.empty(0)
    sums = np.where(known, groups, 0.0).sum(axis=1)
    means = sums / np.maximum(counts, 1)
    filled = np.flatnonzero(counts)
    nearest = np.maximum(np.searchsorted(filled, np.arange(len(means)), side="right") - 1, 0)
    averages: Values = means[filled[nearest]]
    return averages


def _are_independent(figures: Values) -> bool:
    """Tests by von Neumann's ratio whether neighbouring values are independent.

    The ratio is sum (x_i+1 - x_i)^2 / sum (x_i - mean)^2. For independent values its mean is 2 and its
    variance 4 (n - 2) / (n^2 - 1); it is smaller for autocorrelated ones.
    """
    n = len(figures)
    spread = float(((figures - figures.mean()) ** 2).sum())
    if spread == 0:
        return True
    ratio = float((np.diff(figures) ** 2).sum()) / spread
    return ratio > 2 + NORMAL_5_PERCENT * math.sqrt(4 * (n - 2) / (n**2 - 1))


SERIES = ("ttft", "tpot")
"""Latencies from which the warm-up is determined."""
LATENCIES = ("ttft", "tpot", "e2e")


class FoundWarmUp(NamedTuple):
    """A warm-up that was determined from a run, and the evidence for it."""

    warmup_s: float
    """0 if nothing is cut."""
    evidence: dict[str, Any]
    """Section `warmup` of the summary."""


def find_warm_up(requests: AnyTable) -> FoundWarmUp:
    """Determines the warm-up by MSER-5: it ends with the arrival of the first request in the steady state.

    Nothing is cut if one of the series does not settle. requests: `request_metrics` of the whole run.
    """
    in_order = requests.take(np.argsort(column(requests, "arrival_s", np.float64), kind="stable"))
    series = {name: column(in_order, f"{name}_s", np.float64) for name in SERIES}
    found = {name: warm_up(values) for name, values in series.items()}
    # If all outputs have one token, there is no TPOT.
    asked = {name: found[name] for name, values in series.items() if not np.isnan(values).all()}
    is_settled = bool(asked) and all(one.is_settled for one in asked.values())
    num_cut = max((one.num_values for one in asked.values()), default=0) if is_settled else 0
    return FoundWarmUp(
        float(column(in_order, "arrival_s")[num_cut]) if num_cut else 0.0,
        {
            "method": "MSER-5",
            "settled": is_settled,
            "requests": num_cut,
            "of_requests": len(in_order),
            **{
                name: {
                    "settled": one.is_settled,
                    "requests": one.num_values,
                    "mean_before_s": _mean(series[name][: one.num_values]),
                    "mean_after_s": _mean(series[name][one.num_values :]),
                }
                for name, one in asked.items()
            },
        },
    )


def sections(
    latencies: Mapping[str, Batched],
    throughput: Mapping[str, RunInterval],
    goodput: Mapping[str, RunInterval] | None = None,
) -> dict[str, Any]:
    """Returns the section `intervals` of the summary."""
    found = {
        name: {key: interval_of(series, figure) for key, figure in _FIGURES.items()}
        for name, series in latencies.items()
    }
    found["throughput"] = dict(throughput)
    if goodput is not None:
        found["goodput"] = dict(goodput)
    plain = {section: {key: _to_json(one) for key, one in keys.items()} for section, keys in found.items()}
    return {"confidence": CONFIDENCE, **plain}


_FIGURES: Mapping[str, Figure] = {"mean_s": MEAN, **{f"p{q}_s": percentile(q) for q in PERCENTILES}}


def share_interval(series: Batched, num_met: int) -> RunInterval:
    """Computes the interval of a share; a share of 0 or 1 has a one-sided bound at a distance of 3 / n.

    series: 1 for each request that counts, 0 for each other; num_met: the number of ones.

    This rule of three approximates 1 - 0.05^(1 / n) for n independent requests. Source: Hanley and
    Lippman-Hand, If nothing goes wrong, is everything all right?, JAMA 249, 1983.
    """
    if not series.count or 0 < num_met < series.count:
        return interval_of(series)
    beyond = min(3 / series.count, 1.0)
    all_met = num_met > 0
    return RunInterval(float(all_met), 1 - beyond if all_met else 0.0, 1.0 if all_met else beyond, 0)


def _to_json(one: RunInterval) -> dict[str, Any]:
    return {
        "low": one.low,
        "high": one.high,
        "batches": one.num_batches,
        "lack": None if one.lack is None else one.lack.value,
    }


def _mean(values: NDArray[np.float64]) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if len(known) else float("nan")
