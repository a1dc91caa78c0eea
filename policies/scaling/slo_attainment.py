"""SLO attainment: more replicas while too many requests miss the SLO, one fewer after a calm.

Needs no figure of what a replica can do: it learns by trying. Trying alone would go back and forth under
constant load, so what failed is remembered: the rate of arrivals per replica at which the SLO began to be
missed. A replica goes only if the others would stay below margin times that rate. After forget_s it may be
tried again, as requests and models change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, inf

from policies.scaling import PoolView
from policies.scaling.bounds import require_not_negative, require_positive, require_share
from policies.scaling.pace import Paced


@dataclass(kw_only=True, slots=True)
class SloAttainment(Paced):
    """Looks at the requests that ended since it was last asked; none: nothing is known, nothing changes."""

    interval_s: float = 30.0
    target_share: float = 0.95
    """Of the requests that end, those that meet the SLO."""
    calm_s: float = 600.0
    """With the target met, before a replica goes, and between one that goes and the next."""
    margin: float = 0.9
    """Of the rate per replica that was too much: the most that is tried again."""
    forget_s: float = 86_400.0
    """After which a rate that was too much may be tried again."""
    _num_ended: int = field(default=0, init=False, repr=False, compare=False)
    _num_met: int = field(default=0, init=False, repr=False, compare=False)
    _num_arrivals: int = field(default=0, init=False, repr=False, compare=False)
    _asked_s: float = field(default=0.0, init=False, repr=False, compare=False)
    _missed_s: float | None = field(default=None, init=False, repr=False, compare=False)
    _is_missing: bool = field(default=False, init=False, repr=False, compare=False)
    _too_much_per_s: float = field(default=inf, init=False, repr=False, compare=False)
    _learnt_s: float = field(default=-inf, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Paced.__post_init__(self)
        require_share(self, "target_share", "margin")
        require_not_negative(self, "calm_s", unit="s")
        require_positive(self, "forget_s", unit="s")

    def target(self, pool: PoolView, now: float) -> int:
        """More in proportion to what is missed, one fewer after a calm, else as many as before."""
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
            if not self._is_missing:  # what follows is the backlog of this, at whatever rate
                self._learn(rate_per_s / max(pool.num_replicas, 1), now)
            self._is_missing, self._missed_s = True, now
            if not pool.num_starting:
                wanted = asked + max(1, ceil(asked * (self.target_share - attained) - 1e-9))
        elif num_ended:
            self._is_missing = False
            if now - self._missed_s >= self.calm_s and self._may_go(rate_per_s, pool):
                wanted = asked - 1
                self._missed_s = now
        return self.paced(wanted, pool, now)

    def _learn(self, rate_per_s: float, now: float) -> None:
        if rate_per_s > 0:
            self._too_much_per_s, self._learnt_s = min(self._too_much_per_s, rate_per_s), now

    def _may_go(self, rate_per_s: float, pool: PoolView) -> bool:
        num_left = pool.num_replicas - 1
        return (
            num_left >= 1
            and not pool.num_starting
            and rate_per_s <= self.margin * self._too_much_per_s * num_left
        )
