"""Least outstanding requests, also known as join the shortest queue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.request import Request
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class LeastOutstanding:
    """Ties go to the replica of smallest index."""

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """The replica with the fewest requests that have not ended, at this instant: no delay."""
        counts = [replica.num_outstanding for replica in replicas]
        return counts.index(min(counts))
