"""Computes the data series of plots: curves over time and distributions, reduced to a few hundred points.

A plot of a million iterations would be 30 MB, too much for a browser. The means here are exact integrals over
time and the maxima are kept as well, so that the reduction hides no spike.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Counts, Times


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
    """Computes the points (value, share of values <= it) of the CDF; NaN values are left out.

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
