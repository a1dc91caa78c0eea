"""The replica of every request, under a routing policy that reads no replica.

The policy of the run is called in the order of the arrivals, as in a run of one process, with one copy per
model. The assignment of a shard therefore equals that of the whole run in every process.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from policies.gateway.gateway import Routers
from policies.routing import ChoosesMany, ReplicaView, Routing, chosen, index_views
from sim.engine.replica_pool import ReplicaPool
from sim.workload.base import Arrival, Source, WorkloadNotes
from sim.workload.chunks import Chunk, chunks_of

NOWHERE = -1
"""Used instead of a replica for a request whose model no replica serves."""
ABSENT = -2
"""Used instead of a replica for the id of a request that does not arrive."""


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
        self._routers = Routers(routing)
        self._served = [pool.serves for pool in pools for _ in range(pool.replicas)]
        self._candidates: dict[str | None, list[ReplicaView]] = {}

    def replicas_of(self, chunk: Chunk) -> NDArray[np.int32]:
        """Returns the index of the replica of each request, or NOWHERE, [N]."""
        policy = self._routers[None].policy
        if chunk.model is None and isinstance(policy, ChoosesMany):
            positions = policy.choose_many(len(chunk), self._candidates_of(None))
            return np.asarray(positions, np.int32)  # without models, all replicas are candidates
        each = (self._replica_of(arrival) for arrival in chunk.arrivals())
        return np.fromiter(each, np.int32, len(chunk))

    def _candidates_of(self, model: str | None) -> list[ReplicaView]:
        found = self._candidates.get(model)
        if found is None:
            indices = [i for i, served in enumerate(self._served) if model in (None, served)]
            found = self._candidates[model] = index_views(indices, self._routers[model].policy)
        return found

    def _replica_of(self, arrival: Arrival) -> int:
        request = arrival.request
        policy, choose, _, _ = self._routers[request.model]
        candidates = self._candidates_of(request.model)
        if not candidates:
            return NOWHERE
        return chosen(policy, choose(request, candidates, arrival.at_s), candidates).index


def assign(
    source: Source, routing: Routing, pools: Sequence[ReplicaPool], until_s: float | None = None
) -> Assignment:
    """Reads the traffic of a run and assigns each request to a replica.

    routing: used without a copy, so its state changes. until_s: end of the run, after which no traffic is
    read; None: no end. Raises WrongDecisionError for a policy that reads a replica.
    """
    routers = _StaticRouters(routing, pools)
    replicas = np.full(source.num_requests or 0, ABSENT, np.int32)
    for chunk in _chunks(source, inf if until_s is None else until_s):
        num_ids = int(chunk.request_id.max()) + 1
        if num_ids > len(replicas):
            more = max(num_ids, len(replicas) * 3 // 2) - len(replicas)
            replicas = np.append(replicas, np.full(more, ABSENT, np.int32))
        replicas[chunk.request_id] = routers.replicas_of(chunk)
    return Assignment(replicas=replicas, notes=source.notes)


def _chunks(source: Source, until_s: float) -> Iterator[Chunk]:
    """Yields the requests, up to the first that arrives after until_s."""
    for chunk in chunks_of(source, until_s):
        num_due = int(np.searchsorted(chunk.at_s, until_s, side="right"))
        if num_due < len(chunk):  # a run reads one request ahead, which the traffic's notes include
            yield chunk.where(slice(num_due + 1))
            return
        if len(chunk):
            yield chunk
