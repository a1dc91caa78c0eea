"""Freest: the replica with the most free KV memory per outstanding request.

The dispatch of Llumnix (OSDI 2024), which its paper also compares with as INFaaS++. Prompts without a first
token count as if they took memory besides that in use, so a replica with a queue is less free. With a chunked
prefill, the part of a prompt that is computed counts twice until its first token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar

from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class Freest:
    """Most free KV memory per request; an empty replica is the freest. Ties go to the smallest index."""

    reads_signals: ClassVar[bool] = True

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the freest replica."""
        loads = [
            (replica.num_queued_tokens - replica.num_free_kv_tokens) / replica.num_outstanding
            if replica.num_outstanding
            else -inf
            for replica in replicas
        ]
        return loads.index(min(loads))
