"""Adapter-aware routing: requests go to replicas that have their LoRA adapter."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from fieldlimits import Checked, NonNegativeInt, Unit
from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterAffinity(Checked):
    """Least loaded replica with the adapter. Ties go to the smallest index. Reads all replicas.

    Adapter affinity: requests go to a replica that has their LoRA adapter, unless it is overloaded.

    As in Punica's cluster scheduler and the LoRA affinity of the Gateway API Inference Extension: an adapter
    that is on a GPU need not be loaded, and its requests need not wait for a slot. Among the replicas that
    have it, the one with the fewest outstanding requests is chosen. If that replica has more than
    `max_excess` requests above the least loaded of all replicas, the least loaded replica is chosen and loads
    the adapter as well. A popular adapter therefore spreads.
    """

    max_excess: Annotated[NonNegativeInt, Unit("requests")] = 8
    """Maximum excess of a chosen replica's outstanding requests over the least loaded replica's."""

    keeps_together: ClassVar[str] = "adapter"

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the least loaded replica with the adapter, or the least loaded of all if it is too full."""
        counts = [replica.num_outstanding for replica in replicas]
        fewest = min(counts)
        adapter = request.adapter
        if adapter is None:
            return counts.index(fewest)
        with_adapter = [index for index, replica in enumerate(replicas) if replica.has_adapter(adapter)]
        best = min(with_adapter, key=counts.__getitem__, default=None)
        if best is None or counts[best] > fewest + self.max_excess:
            return counts.index(fewest)
        return best


@dataclass(kw_only=True, slots=True)
class Dedicated:
    """Fixed replica per adapter. Reads no replica.

    Dedicated replicas: each LoRA adapter has its own replica, as without multi-LoRA serving. Adapters are
    assigned in the order of their first requests, one replica after the other; requests without an adapter
    count as one more adapter. With merged weights (`adapters=merged`) and as many replicas as adapters, no
    replica ever switches its adapter; with fewer replicas, some do. If the replica of an adapter is removed,
    the adapter is assigned to another one.
    """

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
