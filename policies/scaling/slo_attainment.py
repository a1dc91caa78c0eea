"""SLO attainment: adds replicas while too many requests miss the SLO, removes one after a calm period.

The capacity of a replica need not be known; it is found by trial. Trials alone would oscillate under constant
load, so the policy stores the arrival rate per replica at which requests began to miss the SLO, and removes a
replica only if the others would stay below margin times that rate. The rate is discarded after forget_s,
because requests and models change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf
from typing import Annotated

from fieldlimits import NonNegative, Positive, PositiveShare, Unit
from policies.scaling import PoolView
from policies.scaling.bounds import Paced


@dataclass(kw_only=True, slots=True)
class SloAttainment(Paced):
    """Scales by the requests that ended since the last call; without such requests nothing changes."""

    interval_s: float = 30.0
    target_share: PositiveShare = 0.95
    """Share of ended requests that must meet the SLO."""
    calm_s: Annotated[NonNegative, Unit("s")] = 600.0
    """Time in seconds with the target met before a replica is removed, and between two removals."""
    margin: PositiveShare = 0.9
    """Maximum arrival rate per replica after a removal, as a share of the rate that was too high."""
    forget_s: Annotated[Positive, Unit("s")] = 86_400.0
    """Time in seconds after which a rate that was too high is discarded."""
    _num_ended: int = field(default=0, init=False, repr=False, compare=False)
    _num_met: int = field(default=0, init=False, repr=False, compare=False)
    _num_arrivals: int = field(default=0, init=False, repr=False, compare=False)
    _asked_s: float = field(default=0.0, init=False, repr=False, compare=False)
    _missed_s: float | None = field(default=None, init=False, repr=False, compare=False)
    _is_missing: bool = field(default=False, init=False, repr=False, compare=False)
    _too_much_per_s: float = field(default=inf, init=False, repr=False, compare=False)
    _learnt_s: float = field(default=-inf, init=False, repr=False, compare=False)

    def target(self, pool: PoolView, now: float) -> int:
        """Returns more replicas by the share of missed requests, one fewer after calm_s, else the same."""
        asked = self.asked(pool)
        num_ended, num_met = pool.num_ended - self._num_ended, pool.num_met - self._num_met
        elapsed_s, num_arrived = now - self._asked_s, pool.num_arrivals - self._num_arrivals
        self._num_ended, self._num_met = pool.num_ended, pool.num_met
        self._asked_s, self._num_arrivals = now, pool.num_arrivals
        rate_per_s = num_arrived / elapsed_s if elapsed_s > 0 else 0.0
        if self._missed_s is None:
            self._missed_s = now
        if now - self._learnt_s > self.forget_s:
            self._too_much_per_s = inf
        wanted = asked
        attained = num_met / num_ended if num_ended else 1.0
        if attained < self.target_share:
            if not self._is_missing:  # later misses are due to the backlog, not to the rate
                self._learn(rate_per_s / max(pool.num_replicas, 1), now)
            self._is_missing, self._missed_s = True, now
            if not pool.num_starting:
                wanted = asked + max(1, ceil(asked * (self.target_share - attained) - 1e-9))
        elif num_ended:
            self._is_missing = False
            if now - self._missed_s >= self.calm_s and self._may_remove(rate_per_s, pool):
                wanted = asked - 1
                self._missed_s = now
        return self.paced(wanted, pool, now)

    def _learn(self, rate_per_s: float, now: float) -> None:
        if rate_per_s > 0:
            self._too_much_per_s, self._learnt_s = min(self._too_much_per_s, rate_per_s), now

    def _may_remove(self, rate_per_s: float, pool: PoolView) -> bool:
        num_left = pool.num_replicas - 1
        return (
            num_left >= 1
            and not pool.num_starting
            and rate_per_s <= self.margin * self._too_much_per_s * num_left
        )
