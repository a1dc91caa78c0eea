"""Fit of the host times of engine profiles, and of two shares of a device, to measurements of whole engines.

A whole engine is simulated, so its metrics are known only at a few values of each constant. Near the
simulated values, a metric is figure = base + sum over constants of slope * (constant - at) with one slope
above and one below `at`: a host time that the GPU hides has no effect until it exceeds the GPU's. Times add
up, so this is nearly exact for times: 300 us more per iteration of 10 ms and 1,000 output tokens lengthen E2E
by 0.3 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from hwmodels.fitting.robust import NUM_STARTS, Floats, spread_points

LEAST_SHARE = 0.05
"""Minimum of a predicted metric as a share of its base; otherwise lines extrapolate below 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """One constant of the fit, its bounds, and its value if no row determines it."""

    name: str
    neutral: float
    lower: float
    upper: float
    scale: float
    """Standard deviation of the constant over engines or devices: its expected distance from `neutral`."""

    def __post_init__(self) -> None:
        if not self.lower <= self.neutral <= self.upper or not self.scale > 0:
            raise ValueError(
                f"{self.name}: neutral={self.neutral} must be from lower={self.lower} to upper={self.upper}, "
                f"and scale={self.scale} must be > 0"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Response:
    """Simulated metrics as functions of the constants, one row per metric."""

    at: Floats
    """Value of each constant in the base run, by row and constant."""
    base: Floats
    above: Floats
    """Slope towards larger values, by row and constant; 0 where the constant has no effect on the row."""
    below: Floats
    """Slope towards smaller values."""

    def predict(self, values: Floats) -> Floats:
        """Returns the metric of each row for these values of the constants."""
        change = values - self.at
        moved = self.base + (change * self._slopes(change)).sum(axis=1)
        return np.asarray(np.maximum(moved, LEAST_SHARE * self.base))

    def gradient(self, values: Floats) -> Floats:
        """Returns the slope of each row's metric at these values, by constant."""
        change = values - self.at
        moved = self.base + (change * self._slopes(change)).sum(axis=1)
        is_free = moved > LEAST_SHARE * self.base
        return np.asarray(np.where(is_free[:, None], self._slopes(change), 0.0))

    def rows(self, chosen: NDArray[np.bool_]) -> Response:
        """Returns the chosen rows."""
        return Response(
            at=self.at[chosen], base=self.base[chosen], above=self.above[chosen], below=self.below[chosen]
        )

    def _slopes(self, change: Floats) -> Floats:
        return np.where(change > 0, self.above, self.below)


def fit_constants(
    response: Response, measured: Floats, weights: Floats, constants: Sequence[Constant], *, seed: int = 0
) -> Floats:
    """Returns the constants that minimise the logarithms of predicted / measured, robust to outliers.

        sum of weight * soft(log(predicted / measured))^2 + sum of ((constant - neutral) / scale)^2

    weights: of each row, 1 / (the variance of its logarithm), divided by the number of rows with correlated
    errors. The search starts at the neutral values and at points within three standard deviations of them. A
    constant without an effect on any row gets its neutral value. Raises ValueError if there are no rows.
    """
    if not len(measured):
        raise ValueError("no rows to fit the constants to")
    neutral, lower, upper, scale = (
        np.array([getattr(one, name) for one in constants]) for name in ("neutral", "lower", "upper", "scale")
    )
    log_measured = np.log(measured)
    root = np.sqrt(weights)

    def residuals(scaled: Floats) -> Floats:
        own = root * _soft(np.log(response.predict(scaled * scale)) - log_measured)
        return np.concatenate([own, scaled - neutral / scale])

    def jacobian(scaled: Floats) -> Floats:
        values = scaled * scale
        predicted = response.predict(values)
        slope = _soft_slope(np.log(predicted) - log_measured)
        own = (root * slope / predicted)[:, None] * response.gradient(values) * scale
        return np.concatenate([own, np.eye(len(constants))])

    inner = lower + 0.1 * scale, np.maximum(lower, upper - 0.1 * scale)
    spread = neutral + 3 * scale * (2 * spread_points(NUM_STARTS - 1, len(neutral), seed) - 1)
    results = [
        least_squares(
            residuals,
            np.clip(start, *inner) / scale,
            jac=jacobian,
            bounds=(lower / scale, np.maximum(upper, np.nextafter(lower, np.inf)) / scale),
            max_nfev=500,
        )
        for start in (neutral, *spread)
    ]
    best = min(results, key=lambda result: float(result.cost))
    return np.asarray(np.clip(best.x * scale, lower, upper))


SOFT = 0.1
"""Scale of the logarithm above which errors (about 10 %) count linearly."""


def _soft(residual: Floats) -> Floats:
    """Returns z with z^2 = 2 s^2 (sqrt(1 + (r / s)^2) - 1), soft l1: r near 0, its root beyond s."""
    half = np.sqrt(2 * (np.sqrt(1 + (residual / SOFT) ** 2) - 1))
    return np.asarray(np.sign(residual) * SOFT * half)


def _soft_slope(residual: Floats) -> Floats:
    """Returns the derivative of `_soft`."""
    ratio = residual / SOFT
    root = np.sqrt(1 + ratio**2)
    half = np.sqrt(2 * (root - 1))
    near = np.abs(ratio) < 1e-4
    return np.asarray(np.where(near, 1.0, np.abs(ratio) / (root * np.where(near, 1.0, half))))
