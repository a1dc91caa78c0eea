"""What every autoscaler has: how often it is asked, and the fewest and the most replicas."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from policies.scaling import PoolView


@dataclass(kw_only=True, slots=True)
class Bounded:
    """Settings, and the two things that are done with them."""

    interval_s: float = 15.0
    min_replicas: int = 1
    """0: the last one goes, too, once it has nothing to do; who comes then waits for one to start."""
    max_replicas: int = 8

    def __post_init__(self) -> None:
        require_positive(self, "interval_s", unit="s")
        if self.min_replicas < 0:
            raise ValueError(f"min_replicas={self.min_replicas}: must be >= 0")
        if self.max_replicas < 1:
            raise ValueError(f"max_replicas={self.max_replicas}: must be >= 1; somebody has to serve")
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas={self.min_replicas}: must be <= max_replicas={self.max_replicas}; "
                "lower it or raise max_replicas"
            )

    def bounded(self, wanted: int) -> int:
        """The nearest number of replicas that is allowed."""
        return max(self.min_replicas, min(self.max_replicas, wanted))


def num_present(pool: PoolView) -> int:
    """Replicas that serve or will."""
    return pool.num_replicas + pool.num_starting


def require_positive(settings: object, *names: str, unit: str = "") -> None:
    """Raise ValueError for the first named field that is no finite number > 0."""
    for name in names:
        value = getattr(settings, name)
        if not 0 < value < inf:
            raise ValueError(f"{name}={value}: must be a finite number > 0 {unit}".rstrip())


def require_not_negative(settings: object, *names: str, unit: str = "") -> None:
    """Raise ValueError for the first named field that is no finite number >= 0."""
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value < inf:
            raise ValueError(f"{name}={value}: must be a finite number >= 0 {unit}".rstrip())


def require_share(settings: object, *names: str) -> None:
    """Raise ValueError for the first named field that is not above 0 and at most 1."""
    for name in names:
        value = getattr(settings, name)
        if not 0 < value <= 1:
            raise ValueError(f"{name}={value}: must be a share, > 0 and <= 1")
