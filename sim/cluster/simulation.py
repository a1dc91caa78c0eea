"""A cluster in simulated time: traffic arrives, a router sends it to replicas, clients react to what ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isinf

import numpy as np
import pandas as pd
from simpy import Event

from policies.admission import Admission
from policies.admission.none import AdmitAll
from policies.core.plan import StepPlan
from policies.core.request import Request
from policies.prediction import LengthPredictor
from policies.routing import Routing
from sim.cluster.autoscaler import Autoscaler
from sim.cluster.fleet import Fleet
from sim.cluster.front_door import FrontDoor
from sim.cluster.incidents import Incidents
from sim.cluster.missed import MissedWatch
from sim.cluster.overload import OverloadWatch
from sim.cluster.recovery import Recovery
from sim.cluster.role_switching import RoleSwitching
from sim.cluster.troubles import Troubles
from sim.engine.clock import Clock, Phase
from sim.engine.collector import collector_paused
from sim.engine.interrupt import ctrl_c_noted
from sim.engine.replica import Replica, Surroundings
from sim.metrics.slo import Slo
from sim.records.events import logged_events, waits_by_request
from sim.records.records import EngineRecord, RecoveryRecord, RequestLog, RunRecords, expanded, own_gaps_table
from sim.setup.pool import Pool
from sim.transfer.handovers import Disaggregation, Handovers
from sim.transfer.interconnect import Interconnect
from sim.transfer.mirrors import Mirrors
from sim.transfer.topology import NetworkSettings
from sim.workload.base import Arrival, Source
from sim.workload.retries import Retries

EVENTS_BETWEEN_REPORTS = 4096


def check_fleet(routing: Routing, num_replicas: int) -> None:
    """Raise ValueError where a router's settings and the number of replicas do not go together."""
    check = getattr(routing, "check", None)
    if check is not None:
        check(num_replicas)


class Simulation:
    """One run, of the pools' replicas.

    admission: who is let in; None: everybody. retries: what clients do who are refused or have waited too
    long; None: nothing. max_resends: how often the service sends a request again whose replica has crashed.
    stop_overloaded: end the run once the backlog grows without bound, see `sim.cluster.overload`.
    stop_missed: end it once the SLO is out of reach, see `sim.cluster.missed`; for traffic that says how
    many requests will come. slo: what autoscalers may look at. disaggregation: for pools of which some
    compute prompts and others decode. predictor: for routers that ask how long answers will be. network:
    between replicas. recovery: with what a request is sent again; None: from scratch.

    leap=False steps every iteration by itself: slower, the same result. until_s ends the run at that
    simulated time with whatever is then unfinished. seed: of which branches of a search go on. on_plan: see
    `Surroundings`. signal_age_s: of what the router knows of the replicas, see `Signals`.
    Raises ValueError where the router's settings and the number of replicas do not go together.
    """

    def __init__(
        self,
        *,
        source: Source,
        pools: Sequence[Pool],
        routing: Routing,
        admission: Admission | None = None,
        retries: Retries | None = None,
        troubles: Troubles | None = None,
        max_resends: int = 0,
        slo: Slo | None = None,
        leap: bool = True,
        until_s: float | None = None,
        stop_overloaded: bool = False,
        stop_missed: bool = False,
        seed: int = 0,
        on_plan: Callable[[StepPlan], None] | None = None,
        signal_age_s: float = 0.05,
        disaggregation: Disaggregation | None = None,
        predictor: LengthPredictor | None = None,
        network: NetworkSettings | None = None,
        recovery: Recovery | None = None,
    ) -> None:
        num_replicas = sum(pool.replicas for pool in pools)
        if not num_replicas:
            raise ValueError("replicas=0: must be >= 1")
        if until_s is not None and not until_s > 0:
            raise ValueError(f"until_s={until_s}: must be > 0 s")
        check_fleet(routing, num_replicas)
        self._clock = Clock()
        self._source = source
        self._until_s = float("inf") if until_s is None else until_s
        self._arrivals = source.arrivals()
        self._next: Arrival | None = None
        self._requests = RequestLog()
        self.num_ended = 0
        self._num_ahead = 0  # requests that will arrive or have not ended
        self._last_end_s = 0.0  # the clock itself runs on to timers that have become void
        scales = any(pool.scaling is not None for pool in pools)
        admission = AdmitAll() if admission is None else admission
        recovery = Recovery() if recovery is None else recovery
        self._door = FrontDoor(
            clock=self._clock,
            requests=self._requests,
            admission=admission,
            routing=routing,
            retries=Retries(max_attempts=1) if retries is None else retries,
            on_end=self._follow_up,
            patience_s=source.patience_s,
            max_resends=max_resends,
            recovery=recovery,
            slo=slo if scales else None,
            predictor=predictor,
        )
        readers: list[object] = [admission, routing]
        reads_signals = scales
        self._interconnect: Interconnect | None = None
        if disaggregation is not None or recovery.every_tokens is not None:
            self._interconnect = Interconnect(network or NetworkSettings(), self._clock)
        if recovery.every_tokens is not None:
            assert self._interconnect is not None
            self._door.mirrors = Mirrors(recovery.every_tokens, self._door, self._interconnect)
        if disaggregation is not None:
            assert self._interconnect is not None
            self._door.handovers = Handovers(
                settings=disaggregation,
                clock=self._clock,
                requests=self._requests,
                door=self._door,
                interconnect=self._interconnect,
            )
            readers.append(disaggregation.routing)
            switches = disaggregation.roles.interval_s is not None
            reads_signals = scales or switches or any(pool.role == "mixed" for pool in pools)
        reads_signals = reads_signals or any(getattr(p, "reads_signals", False) for p in readers)
        around = Surroundings(
            clock=self._clock,
            requests=self._requests,
            on_end=self._door.end,
            leap=leap,
            seed=seed,
            on_plan=on_plan,
            on_first_token=self._door.first_token if self._door.sees_first_tokens else None,
            signal_age_s=signal_age_s if reads_signals else None,
            are_looked_into=any(getattr(p, "reads_caches", False) for p in readers),
            handovers=self._door.handovers,
            interconnect=self._interconnect,
            mirrors=self._door.mirrors,
        )
        self.fleet = self._door.fleet = Fleet(pools, around, self._door.fleet_changed)
        if disaggregation is not None and self._door.handovers is not None:
            RoleSwitching(
                roles=disaggregation.roles,
                fleet=self.fleet,
                clock=self._clock,
                goes_on=self._goes_on,
            )
        self._incidents = Incidents(
            troubles or Troubles(),
            clock=self._clock,
            fleet=self.fleet,
            seed=seed,
            on_lost=self._door.lost,
            goes_on=self._goes_on,
        )
        self._overload: OverloadWatch | None = None
        if stop_overloaded:
            self._overload = OverloadWatch(
                clock=self._clock,
                requests=self._requests,
                num_ended=lambda: self.num_ended,
                goes_on=self._goes_on,
            )
        self._missed: MissedWatch | None = None
        num_requests, last_s = source.num_requests, source.last_arrival_s
        if stop_missed and slo is not None and num_requests is not None and last_s is not None:
            self._missed = MissedWatch(
                slo=slo,
                num_requests=num_requests,
                last_arrival_s=last_s,
                clock=self._clock,
                requests=self._requests,
                goes_on=self._goes_on,
            )
        for index, pool in enumerate(pools):
            if pool.scaling is not None:
                Autoscaler(
                    pool.scaling,
                    pool_index=index,
                    cold_start_s=pool.cold_start_s,
                    clock=self._clock,
                    fleet=self.fleet,
                    on_start=self._incidents.joins,
                    goes_on=self._goes_on,
                )

    @property
    def replicas(self) -> list[Replica]:
        """All that there ever were, by index."""
        return self.fleet.replicas

    def _goes_on(self) -> bool:
        """Whether requests are under way or to come."""
        return self._num_ahead > 0

    def run(self, report: Callable[[float, int], None] | None = None) -> RunRecords:
        """Run to the end, until_s, or Ctrl-C, which leaves the records so far.

        report(simulated time, requests ended) is called now and then.
        """
        clock = self._clock
        self._expect_next()
        with ctrl_c_noted() as interrupt, collector_paused():
            while clock.run_some(EVENTS_BETWEEN_REPORTS, self._until_s, interrupt):
                if report:
                    report(clock.now, self.num_ended)
        is_early = interrupt.noted or clock.is_stopped or isinf(self._until_s)
        stopped_s = clock.now if is_early else self._until_s
        end_s = stopped_s if self._num_ahead else self._last_end_s
        for replica in self.fleet.replicas:
            replica.stop(end_s)
        self._door.stop(end_s)
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
        self._door.arrive(self._next)
        self._expect_next()

    def _follow_up(self, request: Request) -> None:
        """A request has ended; its user or conversation may send another."""
        self.num_ended += 1
        self._num_ahead -= 1
        self._last_end_s = self._clock.now
        num_output_tokens = self._requests.output_tokens[request.request_id]
        arrival = self._source.follow_up(request, self._clock.now, num_output_tokens)
        if arrival is not None:
            self._num_ahead += 1
            self._clock.at(arrival.at_s, Phase.arrive, lambda event: self._door.arrive(arrival))

    def _records(self, end_s: float, interrupted: bool) -> RunRecords:
        replicas = self.fleet.replicas
        logs = [replica.take_iterations() for replica in replicas]
        own_gaps = own_gaps_table(logs)
        columns, gaps = expanded(logs)
        events = logged_events([replica.events for replica in replicas])
        requests = self._requests.table()
        for name, waited_s in waits_by_request(events, requests["request_id"].to_numpy()).items():
            requests[name] = waited_s
        engines = [
            (replica.index, engine)
            for replica in replicas
            for engine in (*replica.lost_engines, EngineRecord.of(replica.core, end_s))
        ]
        unfilled = [np.insert(e.unfilled, 0, index, axis=1) for index, e in engines if e.unfilled is not None]
        pool_records, replica_records = self.fleet.records(end_s)
        return RunRecords(
            requests=requests,
            iterations=pd.DataFrame(columns, copy=False),
            **gaps._asdict(),
            pools=pool_records,
            replicas=replica_records,
            end_s=end_s,
            interrupted=interrupted,
            overload=None if self._overload is None else self._overload.found,
            missed=None if self._missed is None else self._missed.found,
            events=events,
            own_gaps=own_gaps,
            pinned_token_s=sum(engine.pinned_token_s for _, engine in engines),
            num_evicted_blocks=sum(engine.num_evicted for _, engine in engines),
            unfilled=np.concatenate(unfilled) if len(unfilled) == len(engines) else None,
            adapters=[engine.adapters for _, engine in engines if engine.adapters is not None],
            num_lost_first_tokens=self._requests.num_lost_first_tokens,
            num_crash_tokens=self._requests.num_crash_tokens,
            troubles=tuple(self._incidents.happened),
            num_resends=self._requests.num_resends,
            recovery=self._recovered(),
            failures=dict(self._requests.failures),
            links=() if self._interconnect is None else self._interconnect.records(end_s),
        )

    def _recovered(self) -> RecoveryRecord:
        log, mirrors = self._requests, self._door.mirrors
        record = RecoveryRecord(log.num_resumed, log.num_recomputed_tokens)
        if mirrors is None:
            return record
        return record._replace(
            mirrored_bytes=mirrors.mirrored_bytes,
            num_restored_tokens=mirrors.num_restored_tokens,
            restored_bytes=mirrors.restored_bytes,
        )
