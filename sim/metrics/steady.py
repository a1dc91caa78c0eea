"""Of one long run: where its warm-up ends, and how sure its figures are.

Warm-up by MSER-5: the values, in order of time, are averaged by fives; of all points d at which the n
averages Y could be cut, the one is best after which the mean is known best,

    d* = argmin over 0 <= d <= n / 2 of  sum_{i > d} (Y_i - mean_d)^2 / (n - d)^2

and a minimum in the last tenth of these says that the run never settled, or was too short to say so. Source:
White, Cobb and Spratt, A comparison of five steady-state truncation heuristics for simulation, Winter
Simulation Conference 2000; half of the data as the bound: Hoad, Robinson and Davies, Automating warm-up
length estimation, JORS 61, 2010.

Intervals by batch means: latencies of one run resemble their neighbours, so the usual interval of a mean is
far too narrow. The run is cut into b batches of equally many values, each long against that memory; with x_j
the mean of batch j and x that of all of them,

    h = t(b - 1, 0.975) sqrt(sum_j (x_j - x)^2 / (b (b - 1))) sqrt(1 + 2 m / e)

A mean is within +- h. A percentile q has the quantiles at q - h and q + h as its bounds, with x_j the shares
of values up to it; where q + h is 1 or more, the run is too short. Source: Law, Simulation Modeling and
Analysis, 5th edition, 9.5.3. e is how many independent values would tell as much: n over the integrated
autocorrelation time (Geyer, Practical Markov chain Monte Carlo, Statistical Science 7, 1992: initial monotone
sequence), and m how many there must be, 50 and 3 / (1 - q). The last factor, ours, stands for what so few
batches miss: rare long busy times. If neighbouring batches still resemble each other (von Neumann's ratio,
one-sided, 5 %), in their values or in these shares, there are fewer and longer ones; below `MIN_BATCHES`
there is no interval.

Measured for p99 waits in M/M/1 (2,000, 10,000, 50,000 values; % of runs with an interval, of these % that
hold it): load 0.5: 1 (83), 84 (97), 97 (97); load 0.8: 0, 0, 45 (92); load 0.9: 0, 0, 0. Means: 98 (96), 99
(93), 99 (96); 38 (83), 97 (96), 99 (95); 4 (13), 48 (89), 100 (96): do not trust the few of short, busy runs.
"""

from __future__ import annotations

import math
from enum import Enum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.metrics.paired import CONFIDENCE
from sim.metrics.quantiles import student_t

Values = NDArray[np.float64]

GROUP = 5  # values to an average of MSER-5
MIN_GROUPS = 20  # fewer say nothing about a warm-up
BATCHES = (16, 8)
MIN_BATCHES = BATCHES[-1]
MIN_PER_BATCH = 10
MIN_INDEPENDENT = 50  # values' worth that a figure needs at least
MIN_BEYOND = 3  # of them beyond a percentile
_MEMORY_GROUPS = 4096  # at most, in which the memory is looked for: a batch has hundreds of them
NORMAL_5_PERCENT = -1.6448536269514729
"""Quantile of the standard normal distribution at 0.05, the chance to call independent batches dependent."""


class WarmUp(NamedTuple):
    """How many of a run's first values belong to its beginning."""

    num_values: int
    is_settled: bool
    """Whether the rest is long enough to believe it."""


class Lack(Enum):
    """Why there is no interval."""

    NO_VALUES = "nothing was measured"
    SHORT = "the run is too short"
    DEPENDENT = "batches are autocorrelated"


class RunInterval(NamedTuple):
    """A figure of one run and the bounds of its interval; NaN where `lack` says why there is none."""

    value: float
    low: float
    high: float
    num_batches: int
    lack: Lack | None = None


class Figure(NamedTuple):
    """The mean; or a percentile: the value up to which a share of the values lies."""

    share: float | None = None
    min_per_batch: int = MIN_PER_BATCH
    min_independent: float = MIN_INDEPENDENT

    def of(self, values: Values) -> float:
        """values: one or more."""
        return float(values.mean() if self.share is None else np.percentile(values, 100 * self.share))


MEAN = Figure()


def percentile(q: float) -> Figure:
    """q from 0 to 100, below 100. A batch must be long enough to have a value beyond it: 100 for p99."""
    beyond = round(1 / (1 - q / 100), 6)
    return Figure(q / 100, max(MIN_PER_BATCH, math.ceil(beyond)), max(MIN_INDEPENDENT, MIN_BEYOND * beyond))


def warm_up(values: Values) -> WarmUp:
    """MSER-5 of values in order of time; NaN left out of each average, one without any takes its neighbour's.

    Values all alike have no warm-up. Too few values (< 100) are never settled.
    """
    num_groups = len(values) // GROUP
    if num_groups < MIN_GROUPS:
        return WarmUp(0, False)
    groups = _averages(values[: num_groups * GROUP].reshape(num_groups, GROUP))
    if not len(groups):
        return WarmUp(0, False)
    # Sums from the end: of what is left when the first d are cut, around a centre that keeps rounding small.
    centred = groups - groups.mean()
    left = np.arange(num_groups, 0, -1)
    sums, squares = (np.cumsum(part[::-1])[::-1] for part in (centred, centred**2))
    spread = np.maximum(squares - sums**2 / left, 0.0) / left.astype(np.float64) ** 2
    last = num_groups // 2
    best = int(np.argmin(spread[: last + 1]))
    return WarmUp(best * GROUP, best < last - last // 10)


class Series:
    """A run's steady values, in order of time, NaN left out; what all figures need of them is found once."""

    def __init__(self, values: Values) -> None:
        self.known = values[~np.isnan(values)]
        self._independent_batches: dict[int, bool] = {}

    def interval(self, figure: Figure = MEAN) -> RunInterval:
        """A figure and its interval by batches."""
        known = self.known
        if not len(known):
            return RunInterval(math.nan, math.nan, math.nan, 0, Lack.NO_VALUES)
        whole = figure.of(known)
        if len(known) < MIN_BATCHES * figure.min_per_batch:
            return RunInterval(whole, math.nan, math.nan, 0, Lack.SHORT)
        counted = known if figure.share is None else (known <= whole).astype(np.float64)
        memory = self._memory if figure.share is None else max(self._memory, _memory(counted))
        independent = len(known) / memory
        if independent < figure.min_independent:
            lack = Lack.DEPENDENT if independent < MIN_INDEPENDENT else Lack.SHORT
            return RunInterval(whole, math.nan, math.nan, 0, lack)
        widened = math.sqrt(1 + 2 * figure.min_independent / independent)
        lack = Lack.SHORT
        for num_batches in BATCHES:
            if len(known) < num_batches * figure.min_per_batch:
                continue
            means = _batch_means(counted, num_batches)
            if not (_are_independent(means) and self._has_independent(num_batches)):
                lack = Lack.DEPENDENT
                continue
            error = float(means.std(ddof=1)) / math.sqrt(num_batches)
            half_width = student_t(num_batches - 1, (1 + CONFIDENCE) / 2) * error * widened
            if figure.share is None:
                return RunInterval(whole, whole - half_width, whole + half_width, num_batches)
            if half_width < min(figure.share, 1 - figure.share):
                ends = 100 * (figure.share - half_width), 100 * (figure.share + half_width)
                low, high = (float(bound) for bound in np.percentile(known, ends))
                # A percentile may be a rounding error away from itself.
                return RunInterval(whole, min(low, whole), max(high, whole), num_batches)
            lack = Lack.SHORT
        return RunInterval(whole, math.nan, math.nan, 0, lack)

    @cached_property
    def _memory(self) -> float:
        return _memory(self.known)

    def _has_independent(self, num_batches: int) -> bool:
        """Batches of the values themselves."""
        if num_batches not in self._independent_batches:
            means = _batch_means(self.known, num_batches)
            self._independent_batches[num_batches] = _are_independent(means)
        return self._independent_batches[num_batches]


def _batch_means(values: Values, num_batches: int) -> Values:
    """Of the last values, as many as fill the batches."""
    length = len(values) // num_batches
    means: Values = values[len(values) - num_batches * length :].reshape(num_batches, length).mean(axis=1)
    return means


def _memory(values: Values) -> float:
    """Integrated autocorrelation time, in values, at least 1: so many tell no more than an independent one.

    Long series are averaged in groups first: what is shorter than a group is then counted as a group.
    """
    length = -(-len(values) // _MEMORY_GROUPS)
    groups = values[len(values) % length :].reshape(-1, length).mean(axis=1)
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
    """Of each row, NaN left out; a row without any value takes the one before it, or after the first ones."""
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
    """Von Neumann's ratio, sum (x_i+1 - x_i)^2 / sum (x_i - mean)^2: about 2 where neighbours do not agree.

    It has a variance of 4 (n - 2) / (n^2 - 1) there and is smaller where they do.
    """
    n = len(figures)
    spread = float(((figures - figures.mean()) ** 2).sum())
    if spread == 0:
        return True
    ratio = float((np.diff(figures) ** 2).sum()) / spread
    return ratio > 2 + NORMAL_5_PERCENT * math.sqrt(4 * (n - 2) / (n**2 - 1))
