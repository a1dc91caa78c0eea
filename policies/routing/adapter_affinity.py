"""Adapter affinity: requests go to a replica that has their LoRA adapter, unless it is overloaded.

As in Punica's cluster scheduler and the LoRA affinity of the Gateway API Inference Extension: an adapter that
is on a GPU need not be loaded, and its requests need not wait for a slot. Among the replicas that have it,
the one with the fewest outstanding requests is chosen. If that one has more than `max_excess` requests above
the fewest of all replicas, a replica with the fewest is chosen, and gets the adapter, too. So a popular
adapter spreads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterAffinity:
    """Least loaded replica with the adapter. Ties go to the smallest index. Reads all replicas."""

    max_excess: int = 8
    """Outstanding requests that a replica with the adapter may have above the fewest of all replicas."""

    def __post_init__(self) -> None:
        if self.max_excess < 0:
            raise ValueError(f"max_excess={self.max_excess}: must be >= 0 requests")

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """The least loaded replica that has the adapter, or that has the fewest requests."""
        counts = [replica.num_outstanding for replica in replicas]
        fewest = min(counts)
        adapter = request.adapter
        if adapter is None:
            return counts.index(fewest)
        here = [index for index, replica in enumerate(replicas) if replica.has_adapter(adapter)]
        best = min(here, key=counts.__getitem__, default=None)
        if best is None or counts[best] > fewest + self.max_excess:
            return counts.index(fewest)
        return best
