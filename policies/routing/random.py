"""Random routing: every replica is equally likely, whatever its load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.core.request import Request
from policies.prediction import uniform
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class Random:
    """Uniform random choice. Reads no replica."""

    seed: int = 0
    """Seed of the draws."""

    reads_replicas: ClassVar[bool] = False

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns a random replica."""
        return int(uniform(self.seed, "routing.random", request.request_id) * len(replicas))
