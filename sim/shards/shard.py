"""Simulates a shard: consecutive replicas of a run with exactly the requests that the router gives them.

Requests, replicas and random draws have the numbers of the whole run, so each replica does what it does
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.caching.pins import PinnedTime
from policies.core.request import Request
from policies.routing import ReplicaView
from sim.cluster.fleet import new_replica
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.cluster.simulation import Simulation
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool, RunContext
from sim.records.requests import RequestLog
from sim.records.run import ReplicaRecord, RunRecords
from sim.records.table import column
from sim.shards.assignment import Assignment
from sim.shards.shard_log import ShardRequestLog
from sim.shards.traffic import Bounds, ShardSource


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecords:
    """The records of a shard that has run, and what the end of the whole run depends on.

    records: the tables have the rows of the shard's requests and replicas only; `replicas` has all replicas
      of the run.
    last_end_s: end of the last request, s. has_more: whether requests were unfinished or still to arrive.
    pinned: of each replica of the shard, as its pinned prefixes are kept until the end of the whole run.
    """

    records: RunRecords
    last_end_s: float
    has_more: bool
    pinned: tuple[PinnedTime, ...] = ()


class AsAssigned:
    """Routing policy that sends each request to the replica that the whole run has assigned to it."""

    def __init__(self, replicas: NDArray[np.int32]) -> None:
        self._replicas = replicas
        self._replica_of = memoryview(replicas)  # type: ignore[arg-type]
        self._positions: dict[int, int] = {}
        self._listed: Sequence[ReplicaView] = ()

    def __deepcopy__(self, memo: object) -> AsAssigned:
        return AsAssigned(self._replicas)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the position of the assigned replica."""
        if replicas is not self._listed:
            self._positions = {replica.index: position for position, replica in enumerate(replicas)}
            self._listed = replicas
        return self._positions[self._replica_of[request.request_id]]


class ShardSimulation(Simulation):
    """A simulation of the replicas of a shard with the requests that a static router gives them.

    source: the traffic of the shard. pools: those of the run.
    """

    def __init__(
        self,
        *,
        source: ShardSource,
        assignment: Assignment,
        pools: Sequence[ReplicaPool],
        bounds: Bounds,
        cluster: ClusterSettings,
        sim: SimSettings,
    ) -> None:
        first, end = bounds
        self._first = first
        self._pool_of = [index for index, pool in enumerate(pools) for _ in range(pool.replicas)]
        self._has_more = False
        self._is_own = assignment.of_shard(first, end)
        cluster = replace(cluster, routing=AsAssigned(assignment.replicas))
        super().__init__(source=source, pools=_own_pools(pools, first, end), cluster=cluster, sim=sim)

    def _new_request_log(self) -> RequestLog:
        return ShardRequestLog(self._is_own)

    def run_shard(self, report: Callable[[float, int], None] | None = None) -> ShardRecords:
        """Runs the shard; `report`: see `Simulation.run`."""
        records = self.run(report)
        replica = column(records.events, "replica") + np.int32(self._first)
        records = replace(records, events=records.events.assign(replica=replica))
        return ShardRecords(
            records=records,
            last_end_s=self._last_end_s,
            has_more=self._has_more,
            pinned=tuple(replica.core.block_pool.pinned_time for replica in self.fleet.replicas),
        )

    def _end(self, end_s: float, *, interrupted: bool) -> RunRecords:
        self._has_more = self._requests_remain()
        return super()._end(end_s, interrupted=interrupted)

    def _figures(self, end_s: float) -> dict[str, Any]:
        """Returns what `Simulation._figures` does, with all replicas of the run by their index."""
        every = tuple(ReplicaRecord(pool, 0.0, end_s) for pool in self._pool_of)
        return super()._figures(end_s) | {"replicas": every}


def _own_pools(pools: Sequence[ReplicaPool], first: int, end: int) -> list[ReplicaPool]:
    """Returns the pools with the replicas first to end - 1 of the run, which keep their index."""
    own, start = [], 0
    for pool in pools:
        stop = start + pool.replicas
        num_own = max(0, min(end, stop) - max(first, start))
        own.append(replace(pool, replicas=num_own, make_replica=partial(_made, first, pool)))
        start = stop
    return own


def _made(first: int, pool: ReplicaPool, index: int, own: ReplicaPool, context: RunContext) -> Replica:
    """Returns the replica of a pool that has this index in the shard, and first + index in the run."""
    return new_replica(first + index, pool, context)
