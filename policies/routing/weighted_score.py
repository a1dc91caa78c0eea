"""Weighted score: the replica with the highest weighted sum of cache hit, queue length and free KV memory.

As in the endpoint pickers of the Gateway API Inference Extension and of llm-d, each replica gets three scores
from 0 to 1, and the highest sum of weight times score is chosen:

    prefix   share of the prompt that the replica has cached
    queue    (longest queue - its queue) / (longest - shortest), 1 where all are equal
    kv       share of the replica's KV memory that is free

Weights are 3, 2, 2 as in the extension's default configuration. Queue lengths and free memory are as old as
the service's signals, corrected for the requests sent since then; the cache is looked up exactly, as by
llm-d's precise prefix scorer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fieldlimits import Checked, NonNegative
from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightedScore(Checked):
    """Highest weighted score. Ties: fewest outstanding requests, then smallest index. Reads all replicas."""

    prefix_weight: NonNegative = 3.0
    queue_weight: NonNegative = 2.0
    kv_weight: NonNegative = 2.0

    keeps_together: ClassVar[str] = "prefix"
    reads_caches: ClassVar[bool] = True
    reads_signals: ClassVar[bool] = True

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica with the highest score."""
        queues = [replica.num_waiting + replica.num_unseen for replica in replicas]
        longest, spread = max(queues), max(queues) - min(queues)
        keys = []
        for replica, num_queued in zip(replicas, queues, strict=True):
            queue = (longest - num_queued) / spread if spread else 1.0
            free = (replica.num_free_kv_tokens - replica.num_unseen_tokens) / replica.num_kv_tokens
            score = self.queue_weight * queue + self.kv_weight * max(0.0, free)
            if self.prefix_weight:
                score += self.prefix_weight * replica.num_cached(request) / request.prompt.num_tokens
            keys.append((-score, replica.num_outstanding))
        return keys.index(min(keys))
