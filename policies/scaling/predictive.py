"""Predictive scaling: replicas for the highest arrival rate forecast for the cold start time of a replica.

    wanted = ceil(max(rate now, rates forecast until now + lead_s) / (capacity_per_s * target_share))

As in AWS's predictive scaling, a seasonal forecast gives the expected rate, and the current rate is its lower
bound. The first day, for which there is no forecast, is thus scaled by the current rate. The forecasts are
those of `forecast.py`.

The capacity of a replica is given or learnt. With learn, capacity_per_s is raised to the highest rate at
which a replica finished requests within their SLO in three consecutive intervals. It never falls, and it may
include a rate that was sustained by chance; target_share is the margin for that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil
from typing import Annotated

from fieldlimits import OneOf, Positive, PositiveShare, Unit
from policies.scaling import PoolView
from policies.scaling.bounds import Paced
from policies.scaling.forecast import Forecaster, HoltWinters, SeasonalNaive

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
        """Returns the replicas for the highest rate from now until a new replica would serve."""
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
        """Records the rate of requests within the SLO per replica (the most replicas in the interval)."""
        num_up = max(pool.num_replicas, self._num_up, 1)
        self._sustained.append((pool.num_met - self._num_met) / elapsed_s / num_up)
        self._num_met, self._num_up = pool.num_met, pool.num_replicas
        if len(self._sustained) == SUSTAINED:
            self._learnt_per_s = max(self._learnt_per_s, min(self._sustained))
