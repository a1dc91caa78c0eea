"""A cluster in simulated time: traffic arrives, a router sends it to replicas, clients react to what ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from simpy import Event

from hwmodels.iteration import IterationModel
from policies.engine import EngineCore
from policies.limits import RejectedError
from policies.plan import StepPlan
from policies.request import Request
from policies.routing import Routing
from policies.sequence import Sequence as TokenSequence
from sim.clock import Clock, Phase
from sim.events import logged_events, waits_by_request
from sim.interrupt import ctrl_c_noted
from sim.links import Links
from sim.records import Gaps, RequestLog, RunRecords, Status
from sim.replica import Replica
from sim.workload.base import Arrival, Source

EVENTS_BETWEEN_REPORTS = 4096


def check_fleet(routing: Routing, num_replicas: int) -> None:
    """Raise ValueError where a router's settings and the number of replicas do not go together."""
    check = getattr(routing, "check", None)
    if check is not None:
        check(num_replicas)


class Simulation:
    """One run. `cores` are the replicas' engines, all alike in size; each is driven by `model`.

    leap=False steps every iteration by itself: slower, the same result. until_s ends the run at that
    simulated time with whatever is then unfinished. frontend_s, plans_ahead: see `Replica`. links makes the
    ways between a replica's memory tiers. seed: of which branches of a search go on. on_plan: see `Replica`.
    signal_age_s: of what the router knows of the replicas, see `Signals`.
    Raises ValueError where the router's settings and the number of replicas do not go together.
    """

    def __init__(
        self,
        *,
        source: Source,
        cores: Sequence[EngineCore],
        model: IterationModel,
        routing: Routing,
        leap: bool = True,
        until_s: float | None = None,
        frontend_s: float = 0.0,
        plans_ahead: bool = False,
        links: Callable[[], Links] = Links,
        seed: int = 0,
        on_plan: Callable[[StepPlan], None] | None = None,
        signal_age_s: float = 0.05,
    ) -> None:
        if not cores:
            raise ValueError("replicas=0: must be >= 1")
        if until_s is not None and not until_s > 0:
            raise ValueError(f"until_s={until_s}: must be > 0 s")
        check_fleet(routing, len(cores))
        self._clock = Clock()
        self._source = source
        self._routing = routing
        self._on_routed_end: Callable[[Request, float], None] | None = getattr(routing, "on_end", None)
        self._on_routed_token: Callable[[Request, float], None] | None = getattr(
            routing, "on_first_token", None
        )
        self._until_s = float("inf") if until_s is None else until_s
        self._arrivals = source.arrivals()
        self._next: Arrival | None = None
        self._requests = RequestLog()
        self.num_ended = 0
        self._num_ahead = 0  # requests that will arrive or have not ended
        self._last_end_s = 0.0  # the clock itself runs on to timers that have become void
        self._replicas = [
            Replica(
                i,
                core,
                model,
                self._clock,
                self._requests,
                self._on_end,
                leap,
                frontend_s,
                plans_ahead,
                links(),
                seed,
                on_plan,
                None if self._on_routed_token is None else self._on_first_token,
                signal_age_s if getattr(routing, "reads_signals", False) else None,
                getattr(routing, "reads_caches", False),
            )
            for i, core in enumerate(cores)
        ]

    def run(self, report: Callable[[float, int], None] | None = None) -> RunRecords:
        """Run to the end, until_s, or Ctrl-C, which leaves the records so far.

        report(simulated time, requests ended) is called now and then.
        """
        clock = self._clock
        self._expect_next()
        with ctrl_c_noted() as interrupt:
            while clock.run_some(EVENTS_BETWEEN_REPORTS, self._until_s, interrupt):
                if report:
                    report(clock.now, self.num_ended)
        stopped_s = clock.now if interrupt.noted else self._until_s
        end_s = stopped_s if self._num_ahead else self._last_end_s
        for replica in self._replicas:
            replica.stop(end_s)
        if report:
            report(end_s, self.num_ended)
        return self._records(end_s, interrupt.noted)

    def _expect_next(self) -> None:
        """Wait for the next open-loop arrival; only one is known ahead, so a long trace needs no memory."""
        self._next = next(self._arrivals, None)
        if self._next is not None:
            self._num_ahead += 1
            self._clock.at(self._next.at_s, Phase.arrive, self._on_arrival)

    def _on_arrival(self, event: Event) -> None:
        assert self._next is not None
        self._arrive(self._next)
        self._expect_next()

    def _arrive(self, arrival: Arrival) -> None:
        """A request reaches the service: open its record and route it."""
        request = arrival.request
        request_id = request.request_id
        self._requests.arrive(request)
        index = self._routing.choose(request, self._replicas, self._clock.now)
        replica = self._replicas[index]
        self._requests.replica[request_id] = index
        try:
            replica.submit(request, arrival.sample_tokens or arrival.num_output_tokens)
        except RejectedError as error:
            self._requests.reject(request_id, str(error), self._clock.now)
            self._follow_up(request)
            return
        if self._source.patience_s is not None:
            give_up_s = self._clock.now + self._source.patience_s
            self._clock.at(give_up_s, Phase.arrive, lambda event: self._give_up(request_id, replica))

    def _give_up(self, request_id: int, replica: Replica) -> None:
        if self._requests.status[request_id] == Status.unfinished:
            replica.abort(request_id)

    def _on_first_token(self, seq: TokenSequence) -> None:
        assert self._on_routed_token is not None
        self._on_routed_token(seq.request, self._clock.now)

    def _on_end(self, seq: TokenSequence) -> None:
        self._follow_up(seq.request)

    def _follow_up(self, request: Request) -> None:
        """A request has ended; its user or conversation may send another."""
        if self._on_routed_end is not None:
            self._on_routed_end(request, self._clock.now)
        self.num_ended += 1
        self._num_ahead -= 1
        self._last_end_s = self._clock.now
        num_output_tokens = self._requests.output_tokens[request.request_id]
        arrival = self._source.follow_up(request, self._clock.now, num_output_tokens)
        if arrival is not None:
            self._num_ahead += 1
            self._clock.at(arrival.at_s, Phase.arrive, lambda event: self._arrive(arrival))

    def _records(self, end_s: float, interrupted: bool) -> RunRecords:
        tables, gaps = zip(*(replica.iterations.expand() for replica in self._replicas), strict=True)
        # Column by column, each replica's part dropped at once: a long run's table exists once, not thrice.
        columns = {name: np.concatenate([table.pop(name) for table in tables]) for name in list(tables[0])}
        core = self._replicas[0].core
        events = logged_events([replica.events for replica in self._replicas])
        requests = self._requests.table()
        for name, waited_s in waits_by_request(events, requests["request_id"].to_numpy()).items():
            requests[name] = waited_s
        return RunRecords(
            requests=requests,
            iterations=pd.DataFrame(columns, copy=False),
            **{name: np.concatenate([getattr(g, name) for g in gaps]) for name in Gaps._fields},
            num_kv_blocks=core.pool.num_blocks,
            block_size=core.pool.block_size,
            num_replicas=len(self._replicas),
            end_s=end_s,
            interrupted=interrupted,
            events=events,
            pinned_token_s=sum(replica.core.pool.pinned_token_s_until(end_s) for replica in self._replicas),
            num_evicted_blocks=sum(replica.core.pool.num_evicted for replica in self._replicas),
            kv_bytes_per_token=self._replicas[0].kv_bytes_per_token,
            unfilled=self._unfilled(),
        )

    def _unfilled(self) -> NDArray[np.int64] | None:
        """Token places that were reserved and never filled, by replica; None where none are reserved."""
        tables = []
        for index, replica in enumerate(self._replicas):
            unfilled = replica.core.pool.unfilled
            if unfilled is None:
                return None
            rows = np.array(unfilled, np.int64).reshape(-1, 3)
            tables.append(np.insert(rows, 0, index, axis=1))
        return np.concatenate(tables)
