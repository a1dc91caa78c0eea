"""Fit of times that are sums of terms, as host times and links are, with what the rows do not determine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import nnls

from hwmodels.fitting.robust import EXACT, SAME_COST, Floats, end_of


class Terms(NamedTuple):
    """Fitted figures, and the ranges of those that the rows do not determine."""

    values: dict[str, float]
    undetermined: dict[str, tuple[float, float]]


def fit_terms(terms: Mapping[str, ArrayLike], measured: ArrayLike, known: ArrayLike = 0.0) -> Terms:
    """Returns the figures >= 0 with which known + the sum of figure x term is closest to the measured rows.

    The squares of relative errors are minimised, so that large rows do not dominate the fit of small ones.
    A figure is not determined, as in `fit_curve`, if doubling or halving it costs nothing when the others are
    fitted again (for one of 0: raising it to a quarter of what it can be). It is at most what makes its term
    the whole of a row.

    terms: a number per row, by the name of the figure. known: the part of each row that is not fitted; rows
    below it count as equal to it.
    """
    rows = np.asarray(measured, np.float64)
    columns = np.stack([np.broadcast_to(np.asarray(term, np.float64), rows.shape) for term in terms.values()])
    shares, target = columns / rows, np.maximum(rows - np.asarray(known, np.float64), 0.0) / rows
    best, least = _solved(shares, target)
    most = least * (1 + SAME_COST) + 0.5 * EXACT**2 * len(rows)
    ranges = {}
    for index, name in enumerate(terms):
        found = _range(shares, target, index, float(best[index]), most)
        if found is not None:
            ranges[name] = found
    return Terms(dict(zip(terms, map(float, best), strict=True)), ranges)


def _solved(shares: Floats, target: Floats) -> tuple[Floats, float]:
    """Returns the figures, and half the sum of squares that remains."""
    if not len(shares):
        return np.zeros(0), 0.5 * float(target @ target)
    largest = np.maximum(shares.max(axis=1), np.finfo(np.float64).tiny)  # figures of one size
    solution: Any = nnls((shares / largest[:, None]).T, target)
    return np.asarray(solution[0] / largest), 0.5 * float(solution[1]) ** 2


def _range(
    shares: Floats, target: Floats, index: int, value: float, most: float
) -> tuple[float, float] | None:
    """Returns the range of a figure in which the cost is at most `most`; None: it is determined."""
    own, others = shares[index], np.delete(shares, index, axis=0)
    if not own.any():
        return 0.0, float("inf")
    upper = 1.0 / float(own.max())

    def is_equal(figure: float) -> bool:
        return _solved(others, target - figure * own)[1] <= most

    higher, lower = min(2 * value if value else 0.25 * upper, upper), 0.5 * value
    higher_is_equal = higher > 1.1 * value and is_equal(higher)
    lower_is_equal = value > 0 and is_equal(lower)
    if not higher_is_equal and not lower_is_equal:
        return None
    return (
        end_of(is_equal, lower, 0.0) if lower_is_equal else end_of(is_equal, value, lower),
        end_of(is_equal, higher, upper) if higher_is_equal else end_of(is_equal, value, higher),
    )
