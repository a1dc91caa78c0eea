"""Weighted round robin: each replica gets a share of the requests in proportion to a fixed weight.

As earliest-deadline-first queues do it (Envoy's weighted round robin): a replica of weight w is due every 1/w
of a virtual time, and whoever is due first gets the request. Weights 2, 1 give 0, 0, 1, 0, 0, 1 ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace

from policies.request import Request
from policies.routing import ReplicaView, check_by_replica, check_positive


@dataclass(kw_only=True, slots=True)
class Weighted:
    """Reads no replica; costs the logarithm of their number."""

    weights: tuple[float, ...] = ()
    """By replica; none: all alike."""
    _due: list[tuple[float, int]] = field(init=False, default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_positive("weights", self.weights)

    def check(self, num_replicas: int) -> None:
        """Raise ValueError unless there is a weight for each replica."""
        check_by_replica("weights", self.weights, num_replicas)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """The replica that is due first; of equals the one of smallest index."""
        if not self._due:
            self._due.extend((1 / self._weight(index), index) for index in range(len(replicas)))
            heapify(self._due)
        due, index = self._due[0]
        heapreplace(self._due, (due + 1 / self._weight(index), index))
        return index

    def _weight(self, index: int) -> float:
        return self.weights[index] if self.weights else 1.0
