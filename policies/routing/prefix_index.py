"""Prefix index: the replica of least cost, computed from the actual contents of the replicas' caches.

As in NVIDIA Dynamo's KV router, to which the engines report every block that they store and evict:

    cost = overlap_weight * (tokens to compute before the request's first token) + outstanding tokens

The tokens to compute are the uncached part of the prompt, and the prompts sent to the replica that have no
output token yet. The replica of least cost gets the request. With overlap_weight=0 the policy is
least_outstanding by tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fieldlimits import Checked, NonNegative
from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixIndex(Checked):
    """Least cost of computation and load. Ties go to the smallest index.

    Reads loads and caches of all replicas.
    """

    overlap_weight: NonNegative = 1.0
    """Weight of tokens to compute relative to outstanding tokens; Dynamo's default is 1."""

    keeps_together: ClassVar[str] = "prefix"
    reads_caches: ClassVar[bool] = True

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica of least cost."""
        costs = [
            self.overlap_weight * (replica.num_queued_tokens - replica.num_cached(request))
            + replica.num_outstanding_tokens
            for replica in replicas
        ]
        return costs.index(min(costs))
