"""Confidence intervals of means, and the comparison of two arms of an experiment seed by seed.

Both arms run with the same seeds and the same traffic (common random numbers), so effects of the random
traffic that are common to both cancel within a pair. With x_i, y_i a metric of the two arms at seed i, i =
1..n:

    d_i = x_i - y_i,  l_i = ln(x_i / y_i);   interval of a mean m: m +- t(n - 1, 0.975) s / sqrt(n)
    ratio = exp(mean of l): the geometric mean of the ratios, its bounds exp of the bounds

s: sample standard deviation; t: quantile of Student's distribution. Source: Law, Simulation Modeling and
Analysis, 5th edition, 10.2.1 (paired t) and 11.2 (common random numbers).
x = 30, 42, 57 against y = 10, 14, 19: every ratio is 3, so the ratio is 3.00 exactly, while the
differences 20, 28, 38 give 28.7 +- 22.4.
There is no correction for multiple comparisons: of 20 comparisons of equal arms, one is expected to show a
difference. Importing `scipy.special` takes 0.1 s, so the quantiles of Student's t that every run needs are
constants here. scipy is imported only for others, such as those of a study with several seeds.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
"""Confidence level of every interval: the share of intervals that contain the true value."""

SAME_REL = 1e-9
"""Relative difference up to which two values count as equal: smaller differences are rounding errors."""

Better = Literal["higher", "lower"]


class Interval(NamedTuple):
    """A mean and the bounds of its confidence interval; the bounds are NaN if there is no interval."""

    mean: float
    low: float
    high: float
    num_values: int
    """Number of values in the mean."""

    @property
    def is_exact(self) -> bool:
        """True if there are several values and all are equal, so the interval has no width."""
        return self.num_values > 1 and self.high - self.low <= SAME_REL * abs(self.mean)


class Outcome(Enum):
    """Outcome of a comparison, from the point of view of the compared arm (not of the baseline)."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no difference beyond noise"
    EQUAL = "equal in every seed"
    UNKNOWN = "unknown"
    """There are fewer than two pairs."""


class Held(Enum):
    """Result of checking an expectation against an interval."""

    HELD = "held"
    MISSED = "missed"
    UNDECIDED = "undecided"
    """The interval contains the bound, or there is no interval."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """Comparison of an arm with a baseline over the seeds for which both have the metric."""

    num_pairs: int
    num_missing: int
    """Omitted seeds, for which one of the arms lacks the metric."""
    difference: Interval
    ratio: Interval | None
    """None if a value is not positive."""
    same: bool
    """True if both arms are equal in every pair, up to rounding."""

    def outcome(self, better: Better) -> Outcome:
        """Returns the outcome by the interval of the ratio, or of the difference if there is no ratio."""
        if self.num_pairs < 2:
            return Outcome.UNKNOWN
        if self.same:
            return Outcome.EQUAL
        low, high, none = (
            (self.difference.low, self.difference.high, 0.0)
            if self.ratio is None
            else (self.ratio.low, self.ratio.high, 1.0)
        )
        if low <= none <= high:
            return Outcome.NO_DIFFERENCE
        return Outcome.BETTER if (low > none) == (better == "higher") else Outcome.WORSE


def mean_interval(values: ArrayLike) -> Interval:
    """Computes the mean of the values and its interval, ignoring NaN; a single value has no interval.

    Example: 1, 2, 3, 4, 5 have the interval 3 +- 2.776 * 1.581 / sqrt(5) = 1.04 to 4.96.
    """
    given = np.asarray(values, dtype=np.float64)
    known = given[~np.isnan(given)]
    count = len(known)
    if not count:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = float(known.mean())
    if count == 1:
        return Interval(mean, math.nan, math.nan, 1)
    if known.min() == known.max():
        return Interval(float(known[0]), float(known[0]), float(known[0]), count)
    quantile = student_t(count - 1, (1 + CONFIDENCE) / 2)
    half_width = quantile * float(known.std(ddof=1)) / math.sqrt(count)
    return Interval(mean, mean - half_width, mean + half_width, count)


def compare_paired(values: Sequence[float], baseline: Sequence[float]) -> Paired:
    """Compares values with the baseline; `values[i]` and `baseline[i]` come from the same seed.

    NaN stands for a run without the metric. Raises ValueError if the lengths differ.
    """
    if len(values) != len(baseline):
        raise ValueError(f"{len(values)} values and {len(baseline)} of the baseline: must be equally many")
    all_x, all_y = np.asarray(values, dtype=np.float64), np.asarray(baseline, dtype=np.float64)
    known = ~(np.isnan(all_x) | np.isnan(all_y))
    x, y = all_x[known], all_y[known]
    scale = np.maximum(np.abs(x), np.abs(y))
    return Paired(
        num_pairs=len(x),
        num_missing=len(all_x) - len(x),
        difference=mean_interval(x - y),
        ratio=_ratio(x, y),
        same=bool(len(x)) and bool((np.abs(x - y) <= SAME_REL * scale).all()),
    )


def judge_ratio(
    ratio: Interval | None, *, at_least: float | None = None, at_most: float | None = None
) -> Held:
    """Decides whether the whole interval of the ratio is within the bounds. Raises ValueError without one."""
    if at_least is None and at_most is None:
        raise ValueError("at_least=None, at_most=None: at least one must be given")
    if ratio is None or math.isnan(ratio.low):
        return Held.UNDECIDED
    lower = -math.inf if at_least is None else at_least
    upper = math.inf if at_most is None else at_most
    # The slack absorbs rounding errors: a ratio of exactly 3 is at least 3.
    slack = SAME_REL * abs(ratio.mean)
    if lower - slack <= ratio.low and ratio.high <= upper + slack:
        return Held.HELD
    return Held.MISSED if ratio.high < lower or ratio.low > upper else Held.UNDECIDED


def _ratio(x: NDArray[np.float64], y: NDArray[np.float64]) -> Interval | None:
    if not len(x) or not (np.isfinite(x) & np.isfinite(y) & (x > 0) & (y > 0)).all():
        return None
    logs = mean_interval(np.log(x / y))
    return Interval(math.exp(logs.mean), math.exp(logs.low), math.exp(logs.high), logs.num_values)


KNOWN = {
    (7, 0.975): 2.364624251592784,
    (15, 0.975): 2.131449545559776,
    (11, 0.999): 4.024701037630738,
}
"""Quantiles by degrees of freedom and probability, for batch means and for the detection of overload."""


@lru_cache(maxsize=256)
def student_t(degrees_of_freedom: int, probability: float) -> float:
    """Returns the quantile: the value that the variable stays below with the given probability."""
    known = KNOWN.get((degrees_of_freedom, probability))
    if known is not None:
        return known
    return float(importlib.import_module("scipy.special").stdtrit(degrees_of_freedom, probability))
