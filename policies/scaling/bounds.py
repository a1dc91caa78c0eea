"""Settings of every autoscaler: the interval of its calls, and the minimum and maximum of replicas."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from policies.scaling import PoolView


@dataclass(kw_only=True, slots=True)
class Bounded:
    """The interval and the bounds of an autoscaler."""

    interval_s: float = 15.0
    min_replicas: int = 1
    """Minimum; with 0 an idle pool stops its last replica, and the next requests wait for one to start."""
    max_replicas: int = 8

    def __post_init__(self) -> None:
        require_positive(self, "interval_s", unit="s")
        if self.min_replicas < 0:
            raise ValueError(f"min_replicas={self.min_replicas}: must be >= 0")
        if self.max_replicas < 1:
            raise ValueError(f"max_replicas={self.max_replicas}: must be >= 1")
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


def require_positive(settings: object, *names: str, unit: str = "") -> None:
    """Raises ValueError for the first named field that is not a finite number > 0."""
    for name in names:
        value = getattr(settings, name)
        if not 0 < value < inf:
            raise ValueError(f"{name}={value}: must be a finite number > 0 {unit}".rstrip())


def require_not_negative(settings: object, *names: str, unit: str = "") -> None:
    """Raises ValueError for the first named field that is not a finite number >= 0."""
    for name in names:
        value = getattr(settings, name)
        if not 0 <= value < inf:
            raise ValueError(f"{name}={value}: must be a finite number >= 0 {unit}".rstrip())


def require_share(settings: object, *names: str) -> None:
    """Raises ValueError for the first named field that is not above 0 and at most 1."""
    for name in names:
        value = getattr(settings, name)
        if not 0 < value <= 1:
            raise ValueError(f"{name}={value}: must be a share, > 0 and <= 1")
