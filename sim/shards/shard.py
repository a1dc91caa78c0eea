"""Simulates a shard: consecutive replicas of a run with exactly the requests that the router sends to them.

Requests, replicas and random draws have the numbers of the whole run, so each replica behaves as in the whole
run.
"""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from policies.caching.runs import PinnedTime
from policies.core.request import Request
from policies.routing import ReplicaView
from sim.cluster.fleet import new_replica
from sim.cluster.recording import RecordedRun, whole_records
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.cluster.simulation import Simulation
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool, RunContext
from sim.records.requests import EMPTY_ROW, RequestLog
from sim.records.run import ReplicaRecord, RunRecords
from sim.records.table import Table, column
from sim.shards.assignment import Assignment
from sim.shards.traffic import Bounds, ShardSource


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRecords:
    """The records of a finished shard, and the data that determines the end of the whole run.

    records: the tables have only the rows of the shard's requests and replicas; `replicas` has all replicas
      of the run.
    last_end_s: end of the last request, s. has_more: whether requests were unfinished or still to arrive.
    pinned: the pinned prefixes of each replica of the shard, which are kept until the end of the whole run.
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


class OwnRows:
    """A column of the log, with a row for each of the shard's requests. rows: request id -> row."""

    __slots__ = ("rows", "values")

    def __init__(self, values: Any, rows: Any) -> None:
        self.values = values
        self.rows = rows

    def __getitem__(self, request_id: int) -> Any:
        return self.values[self.rows[request_id]]

    def __setitem__(self, request_id: int, value: Any) -> None:
        self.values[self.rows[request_id]] = value

    def __len__(self) -> int:
        return len(self.rows)


class ShardRequestLog(RequestLog):
    """A log of the requests for which is_own is true, by request id, [N]."""

    def __init__(self, is_own: NDArray[np.bool_]) -> None:
        super().__init__()
        self._ids = np.flatnonzero(is_own)
        rows = np.cumsum(is_own, dtype=np.int32) - np.int32(1)
        by_id = memoryview(rows)  # type: ignore[arg-type]
        num_own = len(self._ids)
        for name, empty in EMPTY_ROW.items():
            typecode: Any = getattr(getattr(self, name), "typecode", "B")  # has_arrived is of bytes
            values: Any = [empty]
            setattr(self, name, OwnRows(array(typecode, values) * num_own, by_id))

    def table(self) -> Table:
        """Returns one row per request of the shard: see `RequestLog.table`."""
        columns: Any = self
        at = np.flatnonzero(np.frombuffer(columns.has_arrived.values, np.bool_))

        def dropped(column: Any) -> NDArray[Any]:
            values = column.values
            of_requests = np.frombuffer(values, values.typecode)[at]
            del values[:]
            return of_requests

        return self._table_of(self._ids[at], dropped)


class ShardRecording:
    """Keeps the records of a shard until its end, with all replicas of the run by their index.

    assignment: of the whole run. pools: the run's pools. bounds: the replicas of the shard.
    """

    def __init__(self, assignment: Assignment, pools: Sequence[ReplicaPool], bounds: Bounds) -> None:
        self._first, end = bounds
        self._pool_of = [index for index, pool in enumerate(pools) for _ in range(pool.replicas)]
        self.requests = ShardRequestLog(assignment.of_shard(self._first, end))

    def hand_on(self, run: RecordedRun) -> None:
        """Does nothing: no records are flushed before the end."""

    def end(self, run: RecordedRun, end_s: float, *, interrupted: bool) -> RunRecords:
        """Returns the tables of the shard's requests, iterations and events."""
        every = tuple(ReplicaRecord(pool, 0.0, end_s) for pool in self._pool_of)
        figures = run.figures(end_s) | {"replicas": every}
        records = whole_records(self.requests, run, figures, interrupted=interrupted)
        replica = column(records.events, "replica") + np.int32(self._first)
        return replace(records, events=records.events.assign(replica=replica))


def run_shard(
    source: ShardSource,
    assignment: Assignment,
    pools: Sequence[ReplicaPool],
    bounds: Bounds,
    cluster: ClusterSettings,
    sim: SimSettings,
    report: Callable[[float, int], None] | None = None,
) -> ShardRecords:
    """Simulates the replicas bounds[0] to bounds[1] - 1 with the requests that a static router sends to them.

    source: the traffic of the shard. pools: the run's pools. report: see `Simulation.run`.
    """
    # The objects of the last shard refer to each other, and the collector, paused during runs, runs too
    # rarely. They are young, so objects that have survived a full collection need not be scanned.
    gc.collect(1)
    simulation = Simulation(
        source=source,
        pools=_own_pools(pools, *bounds),
        cluster=replace(cluster.for_a_run(), routing=AsAssigned(assignment.replicas)),
        sim=sim,
        recording=ShardRecording(assignment, pools, bounds),
    )
    records = simulation.run(report)
    return ShardRecords(
        records=records,
        last_end_s=simulation.last_end_s,
        has_more=simulation.is_unfinished,
        pinned=tuple(replica.core.block_pool.pinned_time for replica in simulation.fleet.replicas),
    )


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
