"""Draws of numbered things whose popularity follows Zipf's law."""

from __future__ import annotations

import numpy as np

from sim.workload.distributions import IntArray


def zipf_draws(rng: np.random.Generator, num: int, skew: float, count: int) -> IntArray:
    """Draws `count` numbers from 0 to num - 1; number k has a weight of (k + 1)^-skew; 0: all are equal."""
    weights = np.arange(1.0, num + 1) ** -skew
    upper = np.cumsum(weights / weights.sum())[:-1]
    return np.searchsorted(upper, rng.random(count), side="right").astype(np.int64)
