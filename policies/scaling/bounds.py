"""Bounds on the number of replicas, and on the rate of its changes."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Annotated

from fieldlimits import Checked, NonNegative, NonNegativeInt, Positive, PositiveInt, Unit, check
from policies.scaling import PoolView


@dataclass(kw_only=True, slots=True)
class Bounded(Checked):
    """The interval and the bounds of an autoscaler.

    Settings of every autoscaler: the interval of its calls, and the minimum and maximum of replicas.
    """

    interval_s: Annotated[Positive, Unit("s")] = 15.0
    min_replicas: NonNegativeInt = 1
    """Minimum; with 0 an idle pool stops its last replica, and the next requests wait for one to start."""
    max_replicas: PositiveInt = 8

    def __post_init__(self) -> None:
        check(self)
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas={self.min_replicas}: must be <= max_replicas={self.max_replicas}; "
                "lower min_replicas or raise max_replicas"
            )

    def bounded(self, wanted: int) -> int:
        """Clamps a number of replicas to the allowed range."""
        return max(self.min_replicas, min(self.max_replicas, wanted))


def num_present(pool: PoolView) -> int:
    """Returns the number of replicas that serve or start."""
    return pool.num_replicas + pool.num_starting


@dataclass(kw_only=True, slots=True)
class Paced(Bounded):
    """Settings of the limits, and the past decisions.

    Limits on the speed of an autoscaler: stabilisation, cooldowns and step sizes. Stabilisation works as in
    Kubernetes' HorizontalPodAutoscaler: replicas are removed only if no decision within the last window
    wanted them. Cooldowns work as in AWS Auto Scaling: a change waits until the last one has taken effect.
    Without limits a decision takes effect at once.
    """

    stabilisation_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Time in seconds during which replicas must be unwanted before they are removed."""
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
        """Returns the last target (unchanged by crashes), or the present replicas if it is unset or 0."""
        return self.bounded(self._asked or num_present(pool))

    def paced(self, wanted: int, pool: PoolView, now: float) -> int:
        """Returns the new target for a desired number of replicas, and records it."""
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
        """Returns the desired number; for a scale-in, at least the maximum desired in the window.

        Until the decisions cover the window, it is not below the last target.
        """
        if not self._wanted_counts:
            self._wanted_counts.append((now, max(wanted, asked)))
        while self._wanted_counts and self._wanted_counts[0][0] <= now - self.stabilisation_s:
            self._wanted_counts.popleft()
        self._wanted_counts.append((now, wanted))
        return max(wanted, min(asked, max(count for _, count in self._wanted_counts)))
