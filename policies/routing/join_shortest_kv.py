"""Join the shortest KV: the replica with the most free KV memory.

Memory, not the number of requests, limits the batch of a replica. What an engine reports is as old as the
service's signals are; prompts that were sent since then are subtracted, as if none of their KV were cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinShortestKv:
    """Most free KV memory. Ties: fewest outstanding requests, then smallest index. Reads all replicas."""

    reads_signals: ClassVar[bool] = True

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """The replica with the most tokens of KV memory free."""
        keys = [
            (replica.num_unseen_tokens - replica.num_free_kv_tokens, replica.num_outstanding)
            for replica in replicas
        ]
        return keys.index(min(keys))
