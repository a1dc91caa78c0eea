"""A part of a fleet whose router reads only signals: it runs ahead of the gateway, window after window."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf, nextafter
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from simpy import Process

from policies.core.request import Request
from policies.routing import ReplicaView
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.engine.gc_pause import gc_paused
from sim.engine.interrupt import Interrupt
from sim.engine.replica_pool import ReplicaPool
from sim.engine.signals import Signals
from sim.shards.assignment import NOWHERE
from sim.shards.shard import PartSimulation, ShardRecords
from sim.shards.traffic import Bounds
from sim.workload.base import Arrival, Source
from sim.workload.chunks import Chunk, chunks_of

EVENTS_AT_ONCE = 4096
Replicas = NDArray[np.int32]
CountTable = NDArray[np.int64]
"""One row of `sim.engine.signals.Counts` per replica, [R, 5]."""


class AsRouted:
    """Routing policy of a part: the replica that the gateway of the whole run has chosen."""

    reads_signals = True

    def __init__(self) -> None:
        self.replica_of: dict[int, int] = {}
        """Request id -> index of its replica, until the request is sent."""

    def __deepcopy__(self, memo: object) -> AsRouted:
        return self  # the copies of a run with several models read the same positions

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the position of the replica among those of the part that serve the model."""
        index = self.replica_of.pop(request.request_id)
        return bisect_left(replicas, index, key=lambda replica: replica.index)


class FedSource:
    """The traffic of a part, which grows window by window."""

    is_open_loop = True

    def __init__(self, source: Source, bounds: Bounds) -> None:
        """Creates the traffic. source: that of the whole run."""
        self.num_requests: int | None = None
        self.last_arrival_s: float | None = None
        self.patience_s = source.patience_s
        self.notes = source.notes
        self._chunks = chunks_of(source)
        self._rest: Chunk | None = None  # rows that are read and belong to later windows
        self._low, self._end = (NOWHERE if bounds[0] == 0 else bounds[0]), bounds[1]
        self._due: list[Arrival] = []  # the latest first

    def feed(self, replicas: Replicas) -> dict[int, int]:
        """Adds the part's own of the next len(replicas) requests; returns the replica of each by its id."""
        found: dict[int, int] = {}
        fed: list[Arrival] = []
        start = 0
        while start < len(replicas):
            chunk = next(self._chunks) if self._rest is None else self._rest
            size = min(len(chunk), len(replicas) - start)
            self._note(chunk.request_id[:size])
            here = replicas[start : start + size]
            own = np.flatnonzero((here >= self._low) & (here < self._end))
            mine = chunk.where(own)
            fed += mine.arrivals()
            found |= zip(mine.request_id.tolist(), here[own].tolist(), strict=True)
            self._rest = chunk.where(slice(size, None)) if size < len(chunk) else None
            start += size
        self._due = fed[::-1] + self._due
        return found

    def _note(self, request_ids: NDArray[np.int64]) -> None:
        """Is called with the ids of all requests that are read, also of other parts."""

    def due_ids(self) -> Iterator[int]:
        """Yields the ids of the part's own requests that have been added and not handed out."""
        return (arrival.request.request_id for arrival in self._due)

    def arrivals(self) -> Iterator[Arrival]:
        return self

    def __iter__(self) -> FedSource:
        return self

    def __next__(self) -> Arrival:
        if not self._due:
            raise StopIteration  # until more is fed
        return self._due.pop()

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return ()


class PartHere(PartSimulation):
    """A part of a fleet in this process. source: the traffic of the whole run, read by this part only."""

    def __init__(
        self,
        *,
        source: Source,
        pools: Sequence[ReplicaPool],
        bounds: Bounds,
        cluster: ClusterSettings,
        sim: SimSettings,
        **others: Any,
    ) -> None:
        """Creates the simulation. others: see `PartSimulation`."""
        self._fed = self._fed_source(source, bounds)
        self._router = AsRouted()
        self._arriving: Process | None = None
        super().__init__(
            source=self._fed,
            pools=pools,
            bounds=bounds,
            cluster=replace(cluster, routing=self._router),
            sim=sim,
            **others,
        )
        self._signals = [cast(Signals, replica.signals) for replica in self.fleet.replicas]

    def _fed_source(self, source: Source, bounds: Bounds) -> FedSource:
        return FedSource(source, bounds)

    def begin(self, replicas: Replicas, until_s: float) -> None:
        """Simulates the part's own of the next requests, up to a fetch at until_s."""
        self._feed(replicas)
        before_s, never = nextafter(until_s, -inf), Interrupt()
        with gc_paused():
            while self._clock.run_some(EVENTS_AT_ONCE, before_s, never):
                pass
        self._table = np.array([signals.read_at(until_s) for signals in self._signals], np.int64)

    def counts(self) -> CountTable:
        """Returns the counts of the part's replicas at the fetch."""
        assert self._table is not None
        return self._table

    def finish(self, replicas: Replicas, report: Callable[[float, int], None] | None = None) -> ShardRecords:
        """Simulates the last requests to the end of the run; returns the part's records.

        report: see `Simulation.run`. Raises KeyboardInterrupt after Ctrl-C, as half a part is no result.
        """
        self._router.replica_of |= self._fed.feed(replicas)
        shard = self.run_shard(report)
        if shard.records.interrupted:
            raise KeyboardInterrupt
        return shard

    def _feed(self, replicas: Replicas) -> None:
        """Adds requests, which begin to arrive once all of those before have arrived."""
        self._router.replica_of |= self._fed.feed(replicas)
        self._begin_arrivals()

    def _begin_arrivals(self) -> None:
        if self._arriving is None or not self._arriving.is_alive:
            self._arriving = self._clock.begin(self._arrive_in_turn())
