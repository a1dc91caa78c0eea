"""Weighted sums with the same rounding for any number of CPU cores."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def weighted_sum(values: ArrayLike, weights: ArrayLike) -> float:
    """Returns the sum of values times weights; one of them may be a single number.

    `np.dot` uses BLAS, which splits more than 10,000 numbers into one part per core, so that the rounding
    depends on the machine. Its threads also wait busily: with it, computing the figures of a run of 600,000
    iterations took 0.36 s instead of 0.12 s on two cores.
    """
    return float(np.multiply(values, weights).sum())
