"""Sums of products whose last digits do not depend on the number of cores."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike


def weighted_sum(values: ArrayLike, weights: ArrayLike) -> float:
    """Returns the sum of values times weights; one of them may be a single number.

    `np.dot` leaves that to BLAS, which cuts more than 10,000 numbers into a part per core, so that the
    rounding depends on the machine. Its threads also wait busily: three quarters of the CPU time in which
    the figures of a run of 600,000 iterations are computed (0.36 s instead of 0.12 s on two cores).
    """
    return float(np.multiply(values, weights).sum())
