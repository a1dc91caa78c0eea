"""The replica of every request, under a routing policy that reads no replica.

The policy of the run is asked in the order of the arrivals, as in a run of one process, with one copy per
model. So the assignment of a shard is that of the whole run, whichever process computes it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from policies.core.request import Request
from policies.routing import ReplicaView, Routing, chosen
from policies.routing.static import index_views
from sim.cluster.routers import Routers
from sim.engine.replica_pool import ReplicaPool
from sim.workload.base import Source, WorkloadNotes

NOWHERE = -1
"""In place of a replica, for a request whose model no replica serves."""
ABSENT = -2
"""In place of a replica, for the id of a request that does not arrive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """The replica of each request that arrives, by request id, and the notes of the traffic.

    replicas: index of the replica, NOWHERE or ABSENT, [N].
    """

    replicas: NDArray[np.int32]
    notes: WorkloadNotes

    def of_shard(self, first: int, end: int) -> NDArray[np.bool_]:
        """Returns which requests belong to the replicas first to end - 1, [N].

        Requests that no replica serves belong to the shard of replica 0.
        """
        low = NOWHERE if first == 0 else first
        return (self.replicas >= low) & (self.replicas < end)


class _StaticRouters:
    """The routing policies of a run, one per model, with the views of the replicas that serve the model."""

    def __init__(self, routing: Routing, pools: Sequence[ReplicaPool]) -> None:
        self._routers = Routers(routing, None)
        self._served = [pool.serves for pool in pools for _ in range(pool.replicas)]
        self._candidates: dict[str | None, list[ReplicaView]] = {}

    def replica_of(self, request: Request, now: float) -> int:
        """Returns the index of the replica of a request, or NOWHERE."""
        model = request.model
        policy, choose, _, _ = self._routers[model]
        candidates = self._candidates.get(model)
        if candidates is None:
            indices = [i for i, served in enumerate(self._served) if model in (None, served)]
            candidates = self._candidates[model] = index_views(indices, policy)
        if not candidates:
            return NOWHERE
        return chosen(policy, choose(request, candidates, now), candidates).index


def assign(
    source: Source, routing: Routing, pools: Sequence[ReplicaPool], until_s: float | None = None
) -> Assignment:
    """Reads the traffic of a run and assigns each request to a replica.

    routing: used without a copy, so its state changes. until_s: end of the run, after which no traffic is
    read; None: it has none. Raises WrongDecisionError for a policy that reads a replica.
    """
    routers = _StaticRouters(routing, pools)
    replicas = array("i")
    for request, at_s in _requests(source, inf if until_s is None else until_s):
        replica = routers.replica_of(request, at_s)
        num_absent = request.request_id - len(replicas)
        if num_absent < 0:  # it comes after requests with higher ids
            replicas[request.request_id] = replica
        else:
            replicas.extend([ABSENT] * num_absent)
            replicas.append(replica)
    return Assignment(replicas=np.frombuffer(replicas, np.int32), notes=source.notes)


def _requests(source: Source, until_s: float) -> Iterator[tuple[Request, float]]:
    """Yields the requests with their times, up to the first that arrives after until_s."""
    for arrival in source.arrivals():
        at_s = arrival.at_s
        yield arrival.request, at_s
        if at_s > until_s:  # a run reads one request ahead, which the notes of its traffic count
            return
