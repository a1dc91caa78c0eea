"""Each LoRA adapter has its own replica: one model per adapter, as before adapters could share one.

The adapters are assigned in the order of their first requests, one replica after the other; requests without
an adapter are assigned like one more adapter. With as many replicas as adapters, and weights that adapters
are merged into (`adapters=merged`), no replica ever switches; with fewer, some do. An adapter whose replica
has gone is assigned again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(kw_only=True, slots=True)
class Dedicated:
    """Fixed replica per adapter. Reads no replica."""

    _owner: dict[str | None, int] = field(init=False, default_factory=dict, repr=False, compare=False)
    """Index of the replica of each adapter."""

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """The replica of the request's adapter."""
        owner = self._owner.get(request.adapter)
        if owner is not None:
            place = bisect_left(replicas, owner, key=lambda replica: replica.index)
            if place < len(replicas) and replicas[place].index == owner:
                return place
        counts = Counter(self._owner.values())
        place = min(range(len(replicas)), key=lambda place: counts[replicas[place].index])
        self._owner[request.adapter] = replicas[place].index
        return place
