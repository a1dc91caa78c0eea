"""Jitter: the random scatter of iteration times around the hardware model's, with mean 1.

    factor of iteration i = independent(i) x drift(i) x straggler(i), each with mean 1

    independent  lognormal: short disturbances, such as those of the host
    drift        exp of a first-order autoregression: clocks, temperature, co-tenants; lognormal as well
    straggler    straggler_factor with probability straggler_share, else 1, both divided by their mean

A lognormal factor with mean 1 and coefficient of variation c is exp(s z - s^2 / 2), s^2 = ln(1 + c^2). With
c = 0.1, s = 0.0998, and 1 % of the factors are above exp(2.326 s - s^2 / 2) = 1.255. The factors belong to
the number of the iteration, so they do not depend on how many iterations are computed at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import exp, log1p
from typing import Annotated

import numpy as np
from numpy.typing import NDArray

from fieldlimits import FINITE, Checked, Ge, Le, Lt, Positive, Unit

BLOCK = 1024  # factors drawn at once
MAX_CV = 10.0
"""Limit of coefficients of variation: above it, the mean of any run is far below that of the distribution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Jitter(Checked):
    """Settings of the jitter of a replica's iterations."""

    independent_cv: Annotated[float, Ge(0), Le(MAX_CV), "(a share of the mean)"] = 0.0
    """Coefficient of variation of the independent factors: standard deviation over mean."""
    drift_cv: Annotated[float, Ge(0), Le(MAX_CV), "(a share of the mean)"] = 0.0
    """Coefficient of variation of the slow drift."""
    drift_iterations: Positive = 1000.0
    """Iterations over which the correlation of the drift falls to 1/e."""
    straggler_share: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.0
    """Share of the iterations that are stragglers."""
    straggler_factor: Annotated[float, Ge(1), FINITE] = 2.0
    """Duration of a straggler, in durations of other iterations."""

    @property
    def sentence(self) -> str:
        """Returns the sentence of the reports that states the jitter."""
        text = f"With jitter: {100 * self.independent_cv:.3g} % from iteration to iteration"
        if self.drift_cv:
            text += f", a drift of {100 * self.drift_cv:.3g} % over {self.drift_iterations:g} iterations"
        if self.straggler_share:
            share, factor = 100 * self.straggler_share, self.straggler_factor
            text += f", {share:.3g} % of the iterations {factor:g} times as long"
        return f"{text}."


class JitterFactors:
    """The factors of one replica's iterations, drawn in blocks from a generator of its own."""

    __slots__ = ("_drift", "_factors", "_first", "_jitter", "_rng")

    def __init__(self, jitter: Jitter, rng: np.random.Generator) -> None:
        self._jitter = jitter
        self._rng = rng
        self._drift = float(rng.standard_normal())
        self._first = 0
        self._factors: NDArray[np.float64] = np.empty(0)

    def of(self, first: int, count: int) -> NDArray[np.float64]:
        """Returns the factors of iterations first, ..., first + count - 1.

        `first` may not decrease from call to call, as earlier factors are forgotten.
        """
        assert first >= self._first, f"iteration {first}: factors before {self._first} are forgotten"
        while self._first + len(self._factors) < first + count:
            ahead = min(first - self._first, len(self._factors))
            self._factors = np.concatenate([self._factors[ahead:], self._block()])
            self._first += ahead
        start = first - self._first
        return self._factors[start : start + count]

    def _block(self) -> NDArray[np.float64]:
        """Draws the factors of the next `BLOCK` iterations; always as many numbers, whatever the settings."""
        jitter, rng = self._jitter, self._rng
        independent, innovations = rng.standard_normal((2, BLOCK))
        uniform = rng.random(BLOCK)
        correlation = exp(-1 / jitter.drift_iterations)
        steps = (np.sqrt(1 - correlation**2) * innovations).tolist()
        drift = list(accumulate(steps, lambda last, step: correlation * last + step, initial=self._drift))
        self._drift = drift[-1]
        mean = 1 + jitter.straggler_share * (jitter.straggler_factor - 1)
        straggler = np.where(uniform < jitter.straggler_share, jitter.straggler_factor, 1.0) / mean
        factors: NDArray[np.float64] = (
            _lognormal(independent, jitter.independent_cv)
            * _lognormal(np.array(drift[1:]), jitter.drift_cv)
            * straggler
        )
        return factors


def _lognormal(z: NDArray[np.float64], cv: float) -> NDArray[np.float64]:
    """Returns lognormal factors with mean 1 and this coefficient of variation, from standard normals."""
    variance = log1p(cv**2)
    factors: NDArray[np.float64] = np.exp(np.sqrt(variance) * z - variance / 2)
    return factors
