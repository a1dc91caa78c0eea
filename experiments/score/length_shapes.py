"""Distributions of lengths of which only mean and maximum are known."""

from __future__ import annotations

from functools import lru_cache
from statistics import NormalDist

import numpy as np

from sim.workload.distributions import Lognormal, Quantiles

CV = 0.9
"""Largest coefficient of variation that is assumed; chat traces have 0.7 to 1.3."""
POINTS = 400
"""Quantiles of a distribution."""


@lru_cache(maxsize=64)
def capped_lognormal(mean: float, most: float) -> Quantiles:
    """Returns a lognormal distribution cut at `most`, with the given mean after the cut.

    The standard deviation before the cut is half of the way from the mean to `most`, but at most `CV` of the
    mean. Example: mean 9,428, at most 20,000: the standard deviation is 0.56 of the mean. A mean of `most`
    leaves one length.
    """
    if mean >= most:
        return Quantiles(probabilities=(0.0, 1.0), values=(float(most), float(most)))
    cv = min(CV, (most / mean - 1) / 2)
    probabilities = np.linspace(0, 1, POINTS + 1)
    centres = (probabilities[1:] + probabilities[:-1]) / 2
    scores = np.array([NormalDist().inv_cdf(centre) for centre in centres])
    scale = mean
    for _ in range(100):
        values = np.clip(Lognormal(mean=scale, cv=cv).from_normal(scores), 1, most)
        scale *= mean / float(values.mean())
    values = np.sort(values)
    edges = np.concatenate([values[:1], (values[1:] + values[:-1]) / 2, values[-1:]])
    return Quantiles(probabilities=tuple(probabilities), values=tuple(edges))
