"""Predictive: replicas for the highest arrival rate forecast for the time that a replica takes to start.

    wanted = ceil(max(rate now, rates forecast until now + lead_s) / (capacity_per_s * target_share))

As AWS's predictive scaling: a seasonal forecast gives the expected rate, and the current rate is its lower
bound, so that the first day, for which there is no forecast, is scaled by the current rate. Forecasts:
`forecast.py`.

The capacity of a replica is given, or learnt: with learn, capacity_per_s rises to the highest rate at which a
replica was seen to end requests within their SLO in each of three calls in a row. It never falls, and it may
include what was sustained by chance: target_share is the margin for that.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import ceil

from policies.scaling import PoolView
from policies.scaling.bounds import require_positive, require_share
from policies.scaling.forecast import Forecaster, HoltWinters, SeasonalNaive
from policies.scaling.pace import Paced

METHODS = ("seasonal_naive", "holt_winters")
COUNTS = {"requests": "num_arrivals", "tokens": "num_arrived_tokens"}
SUSTAINED = 3


@dataclass(kw_only=True, slots=True)
class Predictive(Paced):
    """Predictive scaling; arrivals are counted from one call to the next, the step of the forecast."""

    interval_s: float = 60.0
    season_s: float = 86_400.0
    """Period in seconds after which traffic repeats; a whole number of intervals."""
    lead_s: float | None = None
    """Forecast horizon in seconds; None: the time that a replica of the pool takes to start."""
    method: str = "seasonal_naive"
    alpha: float = 0.1
    beta: float = 0.01
    gamma: float = 0.3
    """Smoothing of holt_winters: how fast level, trend and season follow the observations."""
    count: str = "requests"
    """Unit of the rate: requests, or tokens of their prompts."""
    capacity_per_s: float = 1.0
    """Requests (or prompt tokens) per second that a replica serves within the SLO."""
    learn: bool = True
    """Whether the sustained rate raises capacity_per_s."""
    target_share: float = 0.8
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
        require_positive(self, "season_s", unit="s")
        if self.lead_s is not None:
            require_positive(self, "lead_s", unit="s")
        require_positive(self, "capacity_per_s")
        require_share(self, "alpha", "beta", "gamma", "target_share")
        if self.method not in METHODS:
            raise ValueError(f"method={self.method}: must be one of {', '.join(METHODS)}")
        if self.count not in COUNTS:
            raise ValueError(f"count={self.count}: must be one of {', '.join(COUNTS)}")
        if self.learn and self.count != "requests":
            raise ValueError(
                f"learn=True, count={self.count}: only requests are counted as they end; "
                "set learn=false and give capacity_per_s"
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
        """Number of replicas for the highest rate now or in the forecast until a replica could serve."""
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
        """Records the rate per replica of requests that met the SLO; counts the larger number of replicas."""
        num_up = max(pool.num_replicas, self._num_up, 1)
        self._sustained.append((pool.num_met - self._num_met) / elapsed_s / num_up)
        self._num_met, self._num_up = pool.num_met, pool.num_replicas
        if len(self._sustained) == SUSTAINED:
            self._learnt_per_s = max(self._learnt_per_s, min(self._sustained))
