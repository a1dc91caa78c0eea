"""Of one long run: where its warm-up ends, and how sure its figures are.

Warm-up by MSER-5: the values, in order of time, are averaged by fives; of all points d at which the n
averages Y could be cut, the one is best after which the mean is known best,

    d* = argmin over 0 <= d <= n / 2 of  sum_{i > d} (Y_i - mean_d)^2 / (n - d)^2

and a minimum in the last tenth of these says that the run never settled, or was too short to say so. Source:
White, Cobb and Spratt, A comparison of five steady-state truncation heuristics for simulation, Winter
Simulation Conference 2000; half of the data as the bound: Hoad, Robinson and Davies, Automating warm-up
length estimation, JORS 61, 2010.

Intervals by sectioning: latencies of one run resemble their neighbours, so the usual interval of a mean is
far too narrow. The run is cut into batches of equally many values, each long against that memory; with b
batches, x_j the figure of batch j and x that of the whole run,

    x +- t(b - 1, 0.975) sqrt(sum_j (x_j - x)^2 / (b (b - 1)))

For a mean that is the method of batch means. Source: Law, Simulation Modeling and Analysis, 5th edition,
9.5.3; sections for quantiles: Asmussen and Glynn, Stochastic Simulation, 2007, III.5a. If neighbouring
batches still resemble each other (von Neumann's ratio, one-sided, 5 %), there are fewer and longer batches;
below `MIN_BATCHES` there is no interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri, stdtrit

from sim.metrics.paired import CONFIDENCE

Values = NDArray[np.float64]

GROUP = 5  # values to an average of MSER-5
MIN_GROUPS = 20  # fewer say nothing about a warm-up
BATCHES = (32, 24, 16, 12, 8)
MIN_BATCHES = BATCHES[-1]
MIN_PER_BATCH = 10
_DEPENDENT = 0.05  # chance to call independent batches dependent


class WarmUp(NamedTuple):
    """How many of a run's first values belong to its beginning."""

    num_values: int
    is_settled: bool
    """Whether the rest is long enough to believe it."""


class Lack(Enum):
    """Why there is no interval."""

    NO_VALUES = "nothing was measured"
    SHORT = "the run is too short"
    DEPENDENT = "what comes late depends on what came long before"


class RunInterval(NamedTuple):
    """A figure of one run and the bounds of its interval; NaN where `lack` says why there is none."""

    value: float
    low: float
    high: float
    num_batches: int
    lack: Lack | None = None

    @property
    def half_width(self) -> float:
        return self.high - self.value


class Figure(NamedTuple):
    """What is worked out of values: along the last axis of an array."""

    of: Callable[[Values], Any]
    min_per_batch: int = MIN_PER_BATCH


MEAN = Figure(lambda values: values.mean(axis=-1))


def percentile(q: float) -> Figure:
    """q from 0 to 100, below 100. A batch must be long enough to have a value beyond it: 100 for p99."""
    beyond = math.ceil(round(1 / (1 - q / 100), 6))
    return Figure(lambda values: np.percentile(values, q, axis=-1), max(MIN_PER_BATCH, beyond))


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


def interval(values: Values, figure: Figure = MEAN) -> RunInterval:
    """A figure of a run's steady values, in order of time, and its interval by sections; NaN is left out."""
    known = values[~np.isnan(values)]
    if not len(known):
        return RunInterval(math.nan, math.nan, math.nan, 0, Lack.NO_VALUES)
    whole = float(figure.of(known))
    lack = Lack.SHORT
    for num_batches in BATCHES:
        length = len(known) // num_batches
        if length < figure.min_per_batch:
            continue
        batches = known[len(known) - num_batches * length :].reshape(num_batches, length)
        of_batches = np.asarray(figure.of(batches), dtype=np.float64)
        if _are_independent(of_batches):
            error = math.sqrt(float(((of_batches - whole) ** 2).sum()) / (num_batches * (num_batches - 1)))
            half_width = float(stdtrit(num_batches - 1, (1 + CONFIDENCE) / 2)) * error
            return RunInterval(whole, whole - half_width, whole + half_width, num_batches)
        lack = Lack.DEPENDENT
    return RunInterval(whole, math.nan, math.nan, 0, lack)


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
    return ratio > 2 + float(ndtri(_DEPENDENT)) * math.sqrt(4 * (n - 2) / (n**2 - 1))
