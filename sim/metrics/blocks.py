"""Confidence intervals for a trace, whose runs are equal for all seeds, by resampling blocks of it.

Other traffic of the same kind would consist of other stretches of requests, so resamples consist of blocks of
consecutive requests, drawn with replacement (moving-block bootstrap). With n requests and blocks of b, each
resample has n / b blocks, and with s the standard deviation of a metric over the resamples, interval of a
metric: its value in the run +- t(n / b - 1, 0.975) s

Requests of a block are dependent, and blocks must not be: b is the larger of the cube root of n and
`TIMES` times the integrated autocorrelation time of the values (`sim.metrics.steady`). A trace of fewer than
`MIN_BLOCKS` blocks has no interval: it shows only one busy hour, or one trend. If a run repeats the trace,
the requests of the trace are drawn with all their copies, because copies add no information. Two runs of one
trace are compared with the same blocks (common random numbers).

Sources: Künsch, The jackknife and the bootstrap for general stationary observations, Annals of Statistics
17, 1989; b of the order of the cube root of n: Hall, Horowitz and Jing, On blocking rules for the bootstrap
with dependent data, Biometrika 82, 1995. `TIMES` and Student's t, which widens intervals of few blocks, are
our choices. Measured coverage of the mean of an AR(1) process, 300 to 1,000 series each (% of the series with
an interval; in brackets, the % of these whose interval contains the true mean):

    correlation     n = 200     n = 1,000    n = 10,000
    0               100 (95)   100 (95)     100 (94)
    0.5              99 (94)   100 (92)     100 (96)
    0.9               2 (71)    98 (91)     100 (92)
    0.98              0          2 (44)     100 (93)

The few intervals of short series with a long memory are therefore not reliable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.metrics.confidence import CONFIDENCE, SAME_REL, Interval, Paired, student_t
from sim.metrics.steady import MEAN, Figure, Series, Values

NUM_RESAMPLES = 400
MIN_BLOCKS = 10
TIMES = 3.0
"""Ratio of a block's length to the integrated autocorrelation time."""
SEED = 20_260_101
"""Seed of the draws: the same blocks in every study."""

Rows = NDArray[np.int64]
Statistic = Callable[[Rows], float]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks of consecutive requests of a trace, and the resamples drawn from them."""

    num_rows: int
    """Number of requests of a run, including copies."""
    period: int
    """Number of requests of the trace, after which a run repeats it."""
    length: int
    """Number of requests of a block."""

    @property
    def count(self) -> int:
        """Number of blocks of the trace."""
        return self.period // self.length

    @property
    def are_enough(self) -> bool:
        """True if there are enough blocks for an interval."""
        return self.count >= MIN_BLOCKS

    def resamples(self) -> Iterator[Rows]:
        """Yields the rows of the requests of each resample."""
        copies = np.arange(0, self.num_rows, self.period)
        for starts in self._starts():
            drawn = (starts[:, None] + np.arange(self.length)).ravel()
            rows = (copies[:, None] + drawn).ravel()
            yield rows[rows < self.num_rows]

    def _starts(self) -> Rows:
        """Draws the first request of each block of each resample [resample, block]."""
        most = self.period - self.length + 1
        return np.random.default_rng(SEED).integers(0, most, (NUM_RESAMPLES, self.count))

    def of_values(self, values: Values, figure: Figure = MEAN) -> Interval:
        """Computes the mean or a percentile of values and its interval, faster than `interval`.

        The bounds of a percentile q are the quantiles q - h and q + h, where h is the half width of the
        interval of the share of values up to it, as in `sim.metrics.steady`.
        """
        known = values[~np.isnan(values)]
        whole = figure.of(known) if len(known) else math.nan
        none = Interval(whole, math.nan, math.nan, 1)
        if not self.are_enough or not len(known):
            return none
        if figure.share is None:
            half_width = self._half_width(values)
            return Interval(whole, whole - half_width, whole + half_width, self.count)
        half_width = self._half_width(np.where(np.isnan(values), math.nan, values <= whole))
        if not half_width < min(figure.share, 1 - figure.share):
            return none
        low, high = np.quantile(known, [figure.share - half_width, figure.share + half_width])
        return Interval(whole, min(float(low), whole), max(float(high), whole), self.count)

    def _half_width(self, values: Values) -> float:
        """Computes half the width of the interval of the mean, from sums over blocks."""
        sums, counts = (np.concatenate([[0.0], np.cumsum(part)]) for part in _sums(values, self.period))
        starts = self._starts()
        ends = starts + self.length
        drawn = (counts[ends] - counts[starts]).sum(axis=1)
        means = (sums[ends] - sums[starts]).sum(axis=1)[drawn > 0] / drawn[drawn > 0]
        return student_t(self.count - 1, (1 + CONFIDENCE) / 2) * float(means.std(ddof=1))

    def interval(self, statistic: Statistic) -> Interval:
        """Computes a metric and its interval; without bounds if there are too few blocks.

        statistic: returns the metric of the requests in some rows; NaN if none of them has it.
        """
        whole = statistic(np.arange(self.num_rows))
        if not self.are_enough or math.isnan(whole):
            return Interval(whole, math.nan, math.nan, 1)
        found = np.array([statistic(rows) for rows in self.resamples()])
        known = found[np.isfinite(found)]
        half_width = student_t(self.count - 1, (1 + CONFIDENCE) / 2) * float(known.std(ddof=1))
        return Interval(whole, whole - half_width, whole + half_width, self.count)

    def compared(self, statistic: Statistic, baseline: Statistic) -> Paired:
        """Compares a metric of two runs of the same requests; `Paired.num_pairs` is the number of blocks."""
        rows = np.arange(self.num_rows)
        one, other = statistic(rows), baseline(rows)
        num_pairs = 0 if math.isnan(one) or math.isnan(other) else self.count if self.are_enough else 1
        ratio = None
        if min(one, other) > 0:
            logs = self.interval(lambda drawn: _log_ratio(statistic(drawn), baseline(drawn)))
            ratio = Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.num_values)
        return Paired(
            num_pairs=num_pairs,
            num_missing=0,
            difference=self.interval(lambda drawn: statistic(drawn) - baseline(drawn)),
            ratio=ratio,
            same=abs(one - other) <= SAME_REL * max(abs(one), abs(other)),
        )


def blocks_of(series: Sequence[Values], period: int | None = None) -> Blocks:
    """Determines the blocks of one or more series of equal length, in order of arrival.

    NaN stands for a request without the value. period: number of requests after which a run repeats its
    trace; None: never.
    """
    num_rows = len(series[0])
    period = num_rows if period is None else min(period, num_rows)
    folded = [Series(_folded(values, period)) for values in series]
    memory = max((one.memory(MEAN) for one in folded if one.count), default=1.0)
    length = math.ceil(max(period ** (1 / 3), TIMES * memory))
    return Blocks(num_rows=num_rows, period=period, length=min(length, period))


def figure_of(values: Values, figure: Figure = MEAN, times: float = 1.0) -> Statistic:
    """Returns the function that computes a metric of some rows, times a factor, ignoring NaN."""

    def statistic(rows: Rows) -> float:
        drawn = values[rows]
        known = drawn[~np.isnan(drawn)]
        return times * figure.of(known) if len(known) else math.nan

    return statistic


def _log_ratio(one: float, other: float) -> float:
    return math.log(one / other) if one > 0 and other > 0 else math.nan


def _folded(values: Values, period: int) -> Values:
    """Returns the mean of each request over its copies."""
    sums, counts = _sums(values, period)
    means: Values = np.where(counts > 0, sums / np.maximum(counts, 1), math.nan)
    return means


def _sums(values: Values, period: int) -> tuple[Values, Values]:
    """Returns the sum of each request over its copies, and their number, without NaN."""
    padded = np.full(-(-len(values) // period) * period, math.nan)
    padded[: len(values)] = values
    copies = padded.reshape(-1, period)
    known = ~np.isnan(copies)
    return np.where(known, copies, 0.0).sum(axis=0), known.sum(axis=0).astype(np.float64)
