"""Routing by signals, window after window: the gateway of a run whose replicas are simulated apart.

Signals are fetched at multiples of an age. A router that reads nothing else of the replicas needs no news of
them until the next fetch, so the parts of the fleet run ahead of the gateway for that long (conservative
synchronisation; Fujimoto, Parallel discrete event simulation, CACM 33, 1990: the age is the lookahead).

    gateway   | routes window 1 |                     | routes window 2 |
    part 0                      | runs up to fetch 2  |                 | runs up to fetch 3 ...
    part 1                      | runs up to fetch 2  |                 | runs up to fetch 3 ...

Every part reads the traffic itself, and gets from the gateway the replicas of the requests of a window. It
returns the counts of its replicas at the next fetch. The records are those of one process, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import Any, Protocol, cast

import numpy as np

from policies.core.limits import RejectedError
from policies.core.request import Request
from policies.routing import ReplicaView, Routing, chosen
from policies.routing.static import SIGNALS, STATE
from policies.user_code.decisions import WrongDecisionError
from sim.cluster.request_attempt import RequestAttempt
from sim.cluster.routers import Routers
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.engine.interrupt import Interrupt, ctrl_c_noted
from sim.engine.replica_pool import ReplicaPool
from sim.engine.signals import Counts, refresh_times_s
from sim.records.run import RunRecords
from sim.shards.assignment import NOWHERE
from sim.shards.merge import merged
from sim.shards.traffic import Bounds
from sim.shards.window_part import CountTable, PartHere, Replicas
from sim.workload.base import Arrival, Source
from sim.workload.chunks import arrivals_of, chunks_of


class Part(Protocol):
    """Consecutive replicas that run ahead of the gateway, here or in another process."""

    @property
    def num_ended(self) -> int:
        """Requests of the part that had ended at the last fetch."""
        ...

    def begin(self, replicas: Replicas, until_s: float) -> None:
        """Begins to simulate the next len(replicas) requests of the traffic, up to a fetch at until_s."""
        ...

    def counts(self) -> CountTable:
        """Waits for the fetch; returns the counts of the part's replicas."""
        ...


class AgedView:
    """A replica as its signals show it; reading anything else raises WrongDecisionError."""

    __slots__ = ("_block_size", "_num_sent", "_num_sent_tokens", "_routing", "index", *sorted(SIGNALS))

    def __init__(
        self, index: int, pool: ReplicaPool, num_blocks: int, block_size: int, routing: object
    ) -> None:
        self.index = index
        self.price_usd_per_hour = pool.price_usd_per_hour
        self.num_kv_tokens = num_blocks * block_size
        self._block_size = block_size
        self._num_sent = self._num_sent_tokens = 0
        self._routing = routing
        self.refresh(Counts())

    def __getattr__(self, name: str) -> Any:
        if name not in STATE:
            raise AttributeError(name)
        raise WrongDecisionError(
            self._routing,
            "choose",
            f"has read {name} of a replica, although reads_only_signals is true",
            f"it may read only index, {', '.join(sorted(SIGNALS))}; leave out the declaration, or do not "
            "read it",
        )

    def refresh(self, counts: Counts) -> None:
        """Takes over the counts of a fetch."""
        self.num_running, self.num_waiting = counts.num_running, counts.num_waiting
        self.num_free_kv_tokens = self.num_kv_tokens - counts.num_blocks_used * self._block_size
        self.num_unseen = self._num_sent - counts.num_entered
        self.num_unseen_tokens = self._num_sent_tokens - counts.num_entered_tokens

    def sent(self, num_tokens: int) -> None:
        """Counts a request of num_tokens prompt tokens that was sent to the replica."""
        self._num_sent += 1
        self._num_sent_tokens += num_tokens
        self.num_unseen += 1
        self.num_unseen_tokens += num_tokens


class WindowGateway:
    """Routes the requests of a run by signals. source: the whole traffic. routing: its state changes."""

    def __init__(
        self,
        source: Source,
        routing: Routing,
        pools: Sequence[ReplicaPool],
        *,
        age_s: float,
        until_s: float | None = None,
    ) -> None:
        self._source = source
        self._routers = Routers(routing, None)
        self._age_s = age_s
        self._until_s = inf if until_s is None else until_s
        self._cores = [pool.core() for pool in pools]
        self._core_of = [i for i, pool in enumerate(pools) for _ in range(pool.replicas)]
        self._served = [pools[i].serves for i in self._core_of]
        self._views = []
        for index, i in enumerate(self._core_of):
            kv = self._cores[i].block_pool
            self._views.append(AgedView(index, pools[i], kv.num_blocks, kv.block_size, routing))
        self._candidates: dict[str | None, list[ReplicaView]] = {}

    def run(
        self,
        parts: Sequence[Part],
        interrupt: Interrupt,
        report: Callable[[float, int], None] | None = None,
    ) -> Replicas:
        """Routes all requests while the parts run; returns the replicas of those of the last window.

        parts: by replica. report: see `Simulation.run`; it is called at every fetch. Stops early after
        Ctrl-C.
        """
        ahead: list[int] = []
        until_s, next_s = -inf, -inf
        for arrival in arrivals_of(chunks_of(self._source, self._until_s)):
            at_s = arrival.at_s
            if at_s > self._until_s:
                ahead.append(0)  # it will not arrive, but the run has more requests
                break
            if at_s >= next_s:
                until_s, next_s = refresh_times_s(at_s, self._age_s)
                self._fetch(parts, np.array(ahead, np.int32), until_s)
                ahead.clear()
                if report:
                    report(until_s, sum(part.num_ended for part in parts))
                if interrupt.noted:
                    break
            ahead.append(self._replica_of(arrival))
        return np.array(ahead, np.int32)

    def _fetch(self, parts: Sequence[Part], replicas: Replicas, until_s: float) -> None:
        """Lets all parts run up to a fetch, and takes over their counts."""
        for part in parts:
            part.begin(replicas, until_s)
        views = iter(self._views)
        for part in parts:
            for row in part.counts().tolist():
                next(views).refresh(Counts(*row))

    def _replica_of(self, arrival: Arrival) -> int:
        """Returns the replica of a request, or NOWHERE if none serves its model."""
        request = arrival.request
        policy, choose, _, _ = self._routers[request.model]
        candidates = self._candidates.get(request.model)
        if candidates is None:
            fitting = [
                v
                for v, served in zip(self._views, self._served, strict=True)
                if request.model in (None, served)
            ]
            candidates = self._candidates[request.model] = cast(list[ReplicaView], fitting)
        if not candidates:
            return NOWHERE
        view = cast(AgedView, chosen(policy, choose(request, candidates, arrival.at_s), candidates))
        if self._is_taken(request, RequestAttempt(arrival, arrival.at_s), view.index):
            view.sent(request.prompt.num_tokens)
        return view.index

    def _is_taken(self, request: Request, attempt: RequestAttempt, index: int) -> bool:
        """Returns whether the engine of a replica accepts a request; one that it rejects is not sent."""
        try:
            self._cores[self._core_of[index]].bounds_of(request, attempt.stop_after)
        except RejectedError:
            return False
        return True


def part_bounds(shards: int | str, num_replicas: int, num_processes: int = 1) -> list[Bounds]:
    """Returns first and end of the replicas of each part; auto: as many parts as processes."""
    num_parts = min(num_processes, num_replicas) if isinstance(shards, str) else shards
    return [(i * num_replicas // num_parts, (i + 1) * num_replicas // num_parts) for i in range(num_parts)]


def run_windows(
    source: Source,
    new_source: Callable[[], Source],
    pools: Sequence[ReplicaPool],
    bounds: Sequence[Bounds],
    cluster: ClusterSettings,
    sim: SimSettings,
    report: Callable[[float, int], None] | None = None,
) -> RunRecords:
    """Runs a fleet of parts in this process; returns the records of the whole run.

    source: the traffic, which the gateway reads. new_source: makes that of each part. bounds: the replicas of
    each part. report: see `Simulation.run`. Raises KeyboardInterrupt after Ctrl-C, as a part of a run is no
    result.
    """
    parts = [
        PartHere(source=new_source(), pools=pools, bounds=own, cluster=cluster.for_a_run(), sim=sim)
        for own in bounds
    ]
    gateway = WindowGateway(
        source, cluster.for_a_run().routing, pools, age_s=cluster.signal_age_s, until_s=sim.until_s
    )
    with ctrl_c_noted() as interrupt:
        rest = gateway.run(parts, interrupt, report)
    if interrupt.noted:
        raise KeyboardInterrupt
    return merged([part.finish(rest, report) for part in parts], sim.until_s)
