"""Dedicated replicas: each LoRA adapter has a replica of its own, as without multi-LoRA serving.

The adapters are assigned in the order of their first requests, one replica after the other; requests without
an adapter are assigned like those of one more adapter. With merged weights (`adapters=merged`) and as many
replicas as adapters, no replica ever switches its adapter; with fewer replicas, some do. If the replica of an
adapter is removed, the adapter is assigned to another one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(kw_only=True, slots=True)
class Dedicated:
    """Fixed replica per adapter. Reads no replica."""

    keeps_together: ClassVar[str] = "adapter"
    _owner: dict[str | None, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    """Index of the replica of each adapter."""

    reads_replicas: ClassVar[bool] = False

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica of the request's adapter, and assigns one at the adapter's first request."""
        owner = self._owner.get(request.adapter)
        if owner is not None:
            position = bisect_left(replicas, owner, key=lambda replica: replica.index)
            if position < len(replicas) and replicas[position].index == owner:
                return position
        counts = Counter(self._owner.values())
        position = min(range(len(replicas)), key=lambda position: counts[replicas[position].index])
        self._owner[request.adapter] = replicas[position].index
        return position
