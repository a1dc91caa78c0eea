"""Arrivals of one client: independent gaps with a Gamma or Weibull distribution, from a moment in the middle.

A client was active before the traffic begins, so the time to its first request is the rest of a gap in
progress. The gap that covers a given moment has the density x f(x) / mean (longer gaps are met more often),
and the moment is uniform in it (Feller, "An Introduction to Probability Theory", volume 2, chapter XI.4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from sim.workload.distributions import FloatArray

MAX_PER_CLIENT = 20_000_000
"""Limit of the expected requests of one client, 160 MB of times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gaps:
    """Distribution of the gaps between requests: a shape, and a scale in seconds."""

    pattern: str
    """Gamma or Weibull."""
    shape: float
    scale_s: float

    @classmethod
    def of_gamma(cls, rate_per_s: float, cv: float) -> Gaps:
        """Returns Gamma gaps with a rate and a coefficient of variation: shape 1 / cv^2."""
        return cls(pattern="Gamma", shape=cv**-2, scale_s=cv**2 / rate_per_s)

    @property
    def mean_s(self) -> float:
        """Mean gap, s."""
        of_one = self.shape if self.pattern == "Gamma" else math.gamma(1 + 1 / self.shape)
        return self.scale_s * of_one

    def draw(self, rng: np.random.Generator, count: int) -> FloatArray:
        """Draws gaps in seconds."""
        if self.pattern == "Gamma":
            return rng.gamma(self.shape, self.scale_s, count)
        return self.scale_s * rng.weibull(self.shape, count)

    def first_s(self, rng: np.random.Generator) -> float:
        """Draws the seconds until the first request, the rest of a gap in progress."""
        # x f(x) of a Gamma is a Gamma with shape + 1; of a Weibull, (x / scale)^shape is a Gamma.
        if self.pattern == "Gamma":
            covering = rng.gamma(self.shape + 1, self.scale_s)
        else:
            covering = self.scale_s * rng.gamma(1 + 1 / self.shape) ** (1 / self.shape)
        return float(covering * rng.random())


def renewal_times_s(gaps: Gaps, rng: np.random.Generator, duration_s: float) -> FloatArray:
    """Draws the arrival times of a client in [0, duration_s), sorted.

    Raises ValueError if so many are expected that they would not fit in memory.
    """
    expected = duration_s / gaps.mean_s
    if not expected <= MAX_PER_CLIENT:
        raise ValueError(
            f"{expected:.3g} requests of one client in {duration_s:g} s: must be <= {MAX_PER_CLIENT:,}; "
            "lower the rate or the duration"
        )
    chunk = max(8, int(expected * 1.2))
    return _until(gaps.first_s(rng), lambda: gaps.draw(rng, chunk), duration_s)


def _until(first_s: float, draw: Callable[[], FloatArray], duration_s: float) -> FloatArray:
    """Sums gaps, chunk by chunk, up to duration_s."""
    parts = [np.array([first_s])]
    while parts[-1][-1] < duration_s:
        parts.append(parts[-1][-1] + np.cumsum(draw()))
    times_s = np.concatenate(parts)
    return times_s[: np.searchsorted(times_s, duration_s)]
