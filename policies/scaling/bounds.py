"""Settings of every autoscaler: the interval of its calls, and the minimum and maximum of replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, NonNegativeInt, Positive, PositiveInt, Unit, check
from policies.scaling import PoolView


@dataclass(kw_only=True, slots=True)
class Bounded(Checked):
    """The interval and the bounds of an autoscaler."""

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
