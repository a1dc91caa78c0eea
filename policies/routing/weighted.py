"""Weighted round robin: each replica gets a share of the requests in proportion to a fixed weight.

It works like an earliest-deadline-first queue (Envoy's weighted round robin): a replica of weight w is due
every 1/w units of virtual time, and the replica that is due first gets the request. The weights 2 and 1 give
the order 0, 0, 1, 0, 0, 1 ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heapreplace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fieldlimits import Checked, Positive
from policies.core.request import Request
from policies.routing import ReplicaView, check_by_replica


@dataclass(kw_only=True, slots=True)
class Weighted(Checked):
    """Fixed shares by weight. Reads no replica; a choice costs the logarithm of their number."""

    weights: tuple[Positive, ...] = ()
    """Weight of each replica, by its index; empty: all equal. Replicas that are added later have weight 1."""
    _replicas: Sequence[ReplicaView] = field(init=False, default=(), repr=False, compare=False)
    _due: list[tuple[float, int]] = field(init=False, default_factory=list, repr=False, compare=False)
    """Heap of (virtual time at which a replica is due, its position)."""

    reads_replicas: ClassVar[bool] = False

    def check(self, num_replicas: int) -> None:
        """Raises ValueError unless there is one weight per replica, or none at all."""
        check_by_replica("weights", self.weights, num_replicas)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the replica that is due first; of equals the one of smallest index."""
        if replicas is not self._replicas:
            self._rebuild(replicas)
        due, position = self._due[0]
        heapreplace(self._due, (due + 1 / self._weight(replicas[position]), position))
        return position

    def choose_many(self, count: int, replicas: Sequence[ReplicaView]) -> NDArray[np.int64]:
        """Returns the replicas that are due next, one after the other."""
        if replicas is not self._replicas:
            self._rebuild(replicas)
        gaps = [1 / self._weight(replica) for replica in replicas]
        queue = self._due
        positions = np.empty(count, np.int64)
        for i in range(count):
            due, position = queue[0]
            heapreplace(queue, (due + gaps[position], position))
            positions[i] = position
        return positions

    def _rebuild(self, replicas: Sequence[ReplicaView]) -> None:
        """Rebuilds the heap; known replicas keep their turns, new ones count as served just now."""
        known = {self._replicas[position].index: due for due, position in self._due}
        served = self._due[0][0] if self._due else 0.0
        self._due = [
            (known.get(replica.index, served + 1 / self._weight(replica)), position)
            for position, replica in enumerate(replicas)
        ]
        heapify(self._due)
        self._replicas = replicas

    def _weight(self, replica: ReplicaView) -> float:
        return self.weights[replica.index] if replica.index < len(self.weights) else 1.0
