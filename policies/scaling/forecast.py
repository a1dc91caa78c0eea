"""Forecasts of a seasonal time series: seasonal naive with a trend, and Holt-Winters.

Source: Hyndman and Athanasopoulos, Forecasting: Principles and Practice (3rd ed.), sections 5.2 and 8.3. Both
are exact for a periodic series with or without a linear trend after two seasons of observations. During the
first season the forecast is the last value.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Forecaster(Protocol):
    """Forecasts a series of values at equal time steps."""

    def observe(self, value: float) -> None:
        """Adds the next value."""
        ...

    def forecast(self, num_values: int) -> NDArray[np.float64]:
        """Returns the forecast of the next num_values values; zeros before the first observation."""
        ...


class SeasonalNaive:
    """Forecasts the value of one season ago plus the growth of the seasons' means."""

    def __init__(self, season: int) -> None:
        self._season = season
        self._seen: deque[float] = deque(maxlen=2 * season)

    def observe(self, value: float) -> None:
        """Adds the next value."""
        self._seen.append(value)

    def forecast(self, num_values: int) -> NDArray[np.float64]:
        """Returns the forecast of the next num_values values."""
        season, seen = self._season, np.array(self._seen)
        if len(seen) < season:
            return np.full(num_values, seen[-1] if len(seen) else 0.0)
        last = seen[-season:]
        growth = float(last.mean() - seen[:season].mean()) if len(seen) == 2 * season else 0.0
        ahead = np.arange(num_values)
        forecast: NDArray[np.float64] = last[ahead % season] + growth * (1 + ahead // season)
        return forecast


class HoltWinters:
    """Additive triple exponential smoothing (Winters, 1960), initialised from the first two seasons.

    level_t = alpha (y_t - s_{t-m}) + (1 - alpha) (level_{t-1} + trend_{t-1})
    trend_t = beta (level_t - level_{t-1}) + (1 - beta) trend_{t-1}
    s_t = gamma (y_t - level_t) + (1 - gamma) s_{t-m},  m values per season
    """

    def __init__(self, season: int, *, alpha: float, beta: float, gamma: float) -> None:
        self._season = season
        self._alpha, self._beta, self._gamma = alpha, beta, gamma
        self._first: list[float] = []
        self._naive = SeasonalNaive(season)
        self._level = self._trend = 0.0
        self._seasonal = np.zeros(season)  # [0] belongs to the next value
        self._num_seen = 0

    def observe(self, value: float) -> None:
        """Updates level, trend and season by the next value."""
        season = self._season
        self._num_seen += 1
        if self._num_seen <= 2 * season:
            self._naive.observe(value)
            self._first.append(value)
            if self._num_seen == 2 * season:
                self._begin()
            return
        index = self._num_seen - 1
        seasonal = self._seasonal[index % season]
        level = self._alpha * (value - seasonal) + (1 - self._alpha) * (self._level + self._trend)
        self._trend = self._beta * (level - self._level) + (1 - self._beta) * self._trend
        self._level = level
        self._seasonal[index % season] = self._gamma * (value - level) + (1 - self._gamma) * seasonal

    def forecast(self, num_values: int) -> NDArray[np.float64]:
        """Returns the forecast of the next num_values values; seasonal naive for the first two seasons."""
        if self._num_seen < 2 * self._season:
            return self._naive.forecast(num_values)
        ahead = np.arange(num_values)
        linear = self._level + self._trend * (1 + ahead)
        forecast: NDArray[np.float64] = linear + self._seasonal[(self._num_seen + ahead) % self._season]
        return forecast

    def _begin(self) -> None:
        """Initialises level, trend and season from the first two seasons."""
        season, seasons = self._season, np.array(self._first).reshape(2, self._season)
        means = seasons.mean(axis=1)
        self._trend = float(means[1] - means[0]) / season
        middle = np.arange(season) - (season - 1) / 2
        self._seasonal = (seasons - means[:, None] - self._trend * middle).mean(axis=0)
        self._level = float(means[1]) + self._trend * (season - 1) / 2
        self._first = []
