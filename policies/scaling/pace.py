"""Limits on the speed of an autoscaler: stabilisation, cooldowns and step sizes.

Stabilisation is that of Kubernetes' HorizontalPodAutoscaler: replicas are removed only if no decision of the
last window wanted them. Cooldowns are those of AWS Auto Scaling: a change waits until the last one has taken
effect. Without limits a decision takes effect at once.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Annotated

from fieldlimits import NonNegative, PositiveInt, Unit
from policies.scaling import PoolView
from policies.scaling.bounds import Bounded, num_present


@dataclass(kw_only=True, slots=True)
class Paced(Bounded):
    """Settings of the limits, and the past decisions."""

    stabilisation_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Time in seconds for which replicas must not have been wanted before they are removed."""
    scale_out_cooldown_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Minimum time in seconds from one scale-out to the next."""
    scale_in_cooldown_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Minimum time in seconds from any change to the next scale-in."""
    max_step_out: Annotated[PositiveInt | None, Unit("replica"), "null for no limit"] = None
    """Maximum number of replicas that one decision adds; None: no limit."""
    max_step_in: Annotated[PositiveInt | None, Unit("replica"), "null for no limit"] = None
    """Maximum number of replicas that one decision removes; None: no limit."""
    _asked: int | None = field(default=None, init=False, repr=False, compare=False)
    _wanted_counts: deque[tuple[float, int]] = field(
        default_factory=deque, init=False, repr=False, compare=False
    )
    _out_s: float = field(default=-inf, init=False, repr=False, compare=False)
    _in_s: float = field(default=-inf, init=False, repr=False, compare=False)

    def asked(self, pool: PoolView) -> int:
        """Returns the last target, which crashes do not change; the present replicas if it is unset or 0."""
        return self.bounded(self._asked or num_present(pool))

    def paced(self, wanted: int, pool: PoolView, now: float) -> int:
        """Returns the new target for a wanted number of replicas, and records it."""
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
        """Returns the wanted number; to scale in, at least the maximum wanted in the window.

        Until the decisions cover the window, it is not below the last target.
        """
        if not self._wanted_counts:
            self._wanted_counts.append((now, max(wanted, asked)))
        while self._wanted_counts and self._wanted_counts[0][0] <= now - self.stabilisation_s:
            self._wanted_counts.popleft()
        self._wanted_counts.append((now, wanted))
        return max(wanted, min(asked, max(count for _, count in self._wanted_counts)))
