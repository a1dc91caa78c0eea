"""Join the shortest KV: the replica with the most free KV memory.

Memory, not the number of requests, is what bounds a batch of generations. What an engine reports is as old as
the service's signals are; prompts that were sent since then are taken off, as if nothing of them were cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinShortestKv:
    """Ties go to the fewest outstanding requests, then to the smallest index. Reads all replicas."""

    reads_signals: ClassVar[bool] = True

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """The replica with the most tokens of KV memory free."""
        keys = [
            (replica.num_unseen_tokens - replica.num_free_kv_tokens, replica.num_outstanding)
            for replica in replicas
        ]
        return keys.index(min(keys))
