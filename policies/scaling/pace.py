"""Limits on the speed of an autoscaler: stabilisation, cooldowns, steps.

Stabilisation as in Kubernetes' HorizontalPodAutoscaler: replicas are removed only when no decision of the
last window wanted them. Cooldowns as in AWS Auto Scaling: a change waits until the last one has taken effect.
Without limits a wish is followed at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf

from policies.scaling import PoolView
from policies.scaling.bounds import Bounded, num_present, require_not_negative


@dataclass(kw_only=True, slots=True)
class Paced(Bounded):
    """Settings of the pace, and the memory of what was wished and asked for."""

    stabilisation_s: float = 0.0
    """Time in seconds for which replicas must have been unwanted before they are removed."""
    scale_out_cooldown_s: float = 0.0
    """Minimum time in seconds from one scale-out to the next."""
    scale_in_cooldown_s: float = 0.0
    """Minimum time in seconds from any change to the next scale-in."""
    max_step_out: int | None = None
    """Maximum number of replicas that one decision adds; None: as many as are wanted."""
    max_step_in: int | None = None
    """Maximum number of replicas that one decision removes; None: as many as are unwanted."""
    _asked: int | None = field(default=None, init=False, repr=False, compare=False)
    _wishes: deque[tuple[float, int]] = field(default_factory=deque, init=False, repr=False, compare=False)
    _out_s: float = field(default=-inf, init=False, repr=False, compare=False)
    _in_s: float = field(default=-inf, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        require_not_negative(self, "stabilisation_s", "scale_out_cooldown_s", "scale_in_cooldown_s", unit="s")
        for name in ("max_step_out", "max_step_in"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: must be >= 1 replica; null for no limit")

    def asked(self, pool: PoolView) -> int:
        """Number of replicas asked for last; initially, and after a request for none, those present.

        A crash does not change it.
        """
        return self.bounded(self._asked or num_present(pool))

    def paced(self, wanted: int, pool: PoolView, now: float) -> int:
        """The number of replicas that is asked for now."""
        asked, wanted = self.asked(pool), self.bounded(wanted)
        wanted = self._stabilised(wanted, asked, now)
        if wanted > asked and now - self._out_s >= self.scale_out_cooldown_s:
            self._out_s = now
            asked = wanted if self.max_step_out is None else min(wanted, asked + self.max_step_out)
        elif wanted < asked and now - max(self._out_s, self._in_s) >= self.scale_in_cooldown_s:
            self._in_s = now
            asked = wanted if self.max_step_in is None else max(wanted, asked - self.max_step_in)
        self._asked = asked
        return asked

    def _stabilised(self, wanted: int, asked: int, now: float) -> int:
        """The maximum wish of the window, if that is below the number of replicas.

        While the memory does not yet cover the window, the number of replicas is kept.
        """
        if not self._wishes:
            self._wishes.append((now, max(wanted, asked)))
        while self._wishes and self._wishes[0][0] <= now - self.stabilisation_s:
            self._wishes.popleft()
        self._wishes.append((now, wanted))
        return max(wanted, min(asked, max(wish for _, wish in self._wishes)))
