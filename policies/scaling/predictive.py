"""Predictive scaling: replicas for the highest arrival rate forecast within a replica's cold start time.

    wanted = ceil(max(rate now, rates forecast until now + lead_s) / (capacity_per_s * target_share))

As in AWS's predictive scaling, a seasonal forecast gives the expected rate, and the current rate is its lower
bound. The first day has no forecast, so it is scaled by the current rate. A `Forecaster` makes the forecasts.

The capacity of a replica is given or learnt. With learn, capacity_per_s is raised to the highest rate at
which a replica finished requests within their SLO in three consecutive intervals. It never falls, and it may
include a rate that was sustained by chance; target_share leaves a margin for that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray

from fieldlimits import OneOf, Positive, PositiveShare, Unit
from policies.scaling import PoolView
from policies.scaling.bounds import Paced


class Forecaster(Protocol):
    """Forecasts a series of values at equal time steps.

    Forecasts of a seasonal time series: seasonal naive with a trend, and Holt-Winters.

    Source: Hyndman and Athanasopoulos, Forecasting: Principles and Practice (3rd ed.), sections 5.2 and 8.3.
    Both are exact for a periodic series with or without a linear trend after two seasons of observations.
    During the first season the forecast is the last value.
    """

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


METHODS = ("seasonal_naive", "holt_winters")
COUNTS = {"requests": "num_arrivals", "tokens": "num_arrived_tokens"}
SUSTAINED = 3


@dataclass(kw_only=True, slots=True)
class Predictive(Paced):
    """Predictive scaling; the time step of the forecast is the interval of the calls."""

    interval_s: float = 60.0
    season_s: Annotated[Positive, Unit("s")] = 86_400.0
    """Period of the traffic in seconds; a whole number of intervals."""
    lead_s: Annotated[Positive | None, Unit("s")] = None
    """Forecast horizon in seconds; None: the cold start time of the pool's replicas."""
    method: Annotated[str, OneOf(METHODS)] = "seasonal_naive"
    alpha: PositiveShare = 0.1
    beta: PositiveShare = 0.01
    gamma: PositiveShare = 0.3
    """Smoothing factors of holt_winters for level (alpha), trend (beta) and season (gamma)."""
    count: Annotated[str, OneOf(COUNTS)] = "requests"
    """Unit of the rate: requests, or tokens (of prompts)."""
    capacity_per_s: Positive = 1.0
    """Requests (or prompt tokens) per second that a replica serves within the SLO."""
    learn: bool = True
    """Whether sustained rates raise capacity_per_s."""
    target_share: PositiveShare = 0.8
    """Share of the capacity that is used."""
    stabilisation_s: float = 300.0
    _forecaster: Forecaster = field(init=False, repr=False, compare=False)
    _num_counted: int = field(default=0, init=False, repr=False, compare=False)
    _num_met: int = field(default=0, init=False, repr=False, compare=False)
    _num_up: int = field(default=0, init=False, repr=False, compare=False)
    _asked_s: float = field(default=0.0, init=False, repr=False, compare=False)
    _sustained: deque[float] = field(init=False, repr=False, compare=False)
    _learnt_per_s: float = field(default=0.0, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Paced.__post_init__(self)
        if self.learn and self.count != "requests":
            raise ValueError(
                f"learn=True, count={self.count}: the capacity can only be learnt in requests; "
                "set learn=false and capacity_per_s"
            )
        season = round(self.season_s / self.interval_s)
        if season < 1 or abs(season * self.interval_s - self.season_s) > 1e-9 * self.season_s:
            raise ValueError(
                f"season_s={self.season_s}: must be a whole number of intervals, "
                f"interval_s={self.interval_s} s"
            )
        self._sustained = deque(maxlen=SUSTAINED)
        self._forecaster = (
            HoltWinters(season, alpha=self.alpha, beta=self.beta, gamma=self.gamma)
            if self.method == "holt_winters"
            else SeasonalNaive(season)
        )

    def target(self, pool: PoolView, now: float) -> int:
        """Returns the replicas for the highest rate from now until a new replica could serve."""
        elapsed_s = now - self._asked_s
        if elapsed_s <= 0:
            return self.paced(self.asked(pool), pool, now)
        num_counted = getattr(pool, COUNTS[self.count])
        rate_per_s = (num_counted - self._num_counted) / elapsed_s
        if self.learn:
            self._note_sustained(pool, elapsed_s)
        self._asked_s, self._num_counted = now, num_counted
        self._forecaster.observe(rate_per_s)
        lead_s = pool.cold_start_s if self.lead_s is None else self.lead_s
        forecast = self._forecaster.forecast(ceil(lead_s / self.interval_s) + 1)
        peak_per_s = max(rate_per_s, float(forecast.max()))
        capacity_per_s = max(self.capacity_per_s, self._learnt_per_s)
        wanted = ceil(peak_per_s / (capacity_per_s * self.target_share) - 1e-9)
        return self.paced(wanted, pool, now)

    def _note_sustained(self, pool: PoolView, elapsed_s: float) -> None:
        """Records the rate of requests within the SLO, per replica (maximum replicas in the interval)."""
        num_up = max(pool.num_replicas, self._num_up, 1)
        self._sustained.append((pool.num_met - self._num_met) / elapsed_s / num_up)
        self._num_met, self._num_up = pool.num_met, pool.num_replicas
        if len(self._sustained) == SUSTAINED:
            self._learnt_per_s = max(self._learnt_per_s, min(self._sustained))
