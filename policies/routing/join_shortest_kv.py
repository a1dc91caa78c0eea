"""Join the shortest KV: the replica with the most free KV memory.

Memory, not the number of requests, limits the batch of a replica. The free memory that an engine reports is
as old as the service's signals; prompts sent since then are subtracted, as if none of their KV were cached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinShortestKv:
    """Most free KV memory. Reads all replicas."""

    ties: Literal["outstanding", "index"] = "outstanding"
    """Which of replicas with equally much free memory is chosen: the one with the fewest outstanding
    requests, then of smallest index; or the one of smallest index, for which only signals are read."""

    reads_signals: ClassVar[bool] = True

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica with the most free KV memory."""
        if self.ties == "index":
            used = [replica.num_unseen_tokens - replica.num_free_kv_tokens for replica in replicas]
            return used.index(min(used))
        keys = [
            (replica.num_unseen_tokens - replica.num_free_kv_tokens, replica.num_outstanding)
            for replica in replicas
        ]
        return keys.index(min(keys))
