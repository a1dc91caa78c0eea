"""Simulates a cluster: requests arrive, a router sends them to replicas, clients send follow-ups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, isinf
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from simpy import Event
from simpy.events import ProcessGenerator

from policies.admission import AdmissionTraits
from policies.core.plan import StepPlan
from policies.core.request import Request
from policies.routing import Routing, RoutingTraits
from policies.user_code import note_time, traits_of
from sim.cluster.attached import NumberedSource, UserProcess, begin_processes, check_processes, unhandled
from sim.cluster.autoscaler import Autoscaler, ModelTurns, RoleSwitching
from sim.cluster.disaggregation import Encoders
from sim.cluster.early_stop import MissedSloStop, OverloadStop
from sim.cluster.failures import FailureInjector
from sim.cluster.fleet import Fleet
from sim.cluster.gateway_assembly import GatewayAssembly
from sim.cluster.recording import Recording, WholeRecording
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.engine.attachment import PlanListener
from sim.engine.clock import ARRIVE, Clock, Phase, ctrl_c_noted, gc_paused
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool, RunContext
from sim.engine.signals import AdapterLoads, BusyTime, CacheView, Signals
from sim.metrics.slo import Slo
from sim.records.requests import Status
from sim.records.run import EngineRecord, RecoveryRecord, RunRecords
from sim.transfer.kv_replication import KvReplicator
from sim.workload.base import Arrival, Source

if TYPE_CHECKING:
    from sim.migration.live_migrations import LiveMigrations

EVENTS_BETWEEN_REPORTS = 4096
AFTER_USERS: Final = Phase.control + 1
"""Phase after the events of user processes at the same time."""


def check_fleet(routing: Routing, num_replicas: int) -> None:
    """Raises ValueError if the settings of a router do not fit the number of replicas."""
    check = traits_of(routing, RoutingTraits).check
    if check is not None:
        check(num_replicas)


class Simulation:
    """One run of the replicas of all pools.

    cluster: its policies are used without a copy, so their state changes. on_plan is called with every plan
    before its first iteration. attach: user processes, see `sim.cluster.attached`. recording: the receiver of
    the records; None: all are kept. Raises ValueError if the settings of the router do not fit the number of
    replicas.
    """

    def __init__(
        self,
        *,
        source: Source,
        pools: Sequence[ReplicaPool],
        cluster: ClusterSettings,
        sim: SimSettings = SimSettings(),
        on_plan: Callable[[StepPlan], None] | None = None,
        attach: Sequence[UserProcess] = (),
        recording: Recording | None = None,
    ) -> None:
        check_processes(attach)
        num_replicas = sum(pool.replicas for pool in pools)
        if not num_replicas:
            raise ValueError("replicas=0: must be >= 1")
        check_fleet(cluster.routing, num_replicas)
        self._clock = Clock()
        self._attach = attach
        self._source = source = NumberedSource(source) if attach else source
        self._until_s = inf if sim.until_s is None else sim.until_s
        self._arrivals = source.arrivals()
        self._next: Arrival | None = None
        self._recording: Recording = WholeRecording() if recording is None else recording
        self._requests = self._recording.requests
        self._busy_times: dict[int, BusyTime] = {}  # by replica index, if a pool is scaled
        self.num_ended = 0
        self._num_ahead = 0  # future and unfinished requests
        self._is_cut_short = False
        self.last_end_s = 0.0
        """End of the last ended request, s; the clock may advance further to timers that are no longer valid.
        """
        self.is_unfinished = False
        """Whether requests were unfinished or still to arrive when the run ended."""
        self._assembly = assembly = GatewayAssembly(
            pools,
            cluster,
            clock=self._clock,
            requests=self._requests,
            patience_s=source.patience_s,
            on_end=self._follow_up,
        )
        self.gateway = assembly.gateway
        self._migrations: LiveMigrations | None = None
        self.fleet = Fleet(
            pools,
            RunContext(
                clock=self._clock,
                requests=self._requests,
                on_end=self.gateway.end,
                leap=sim.leap,
                seed=cluster.seed,
            ),
            self.gateway.fleet_changed,
            attach=self._attach_function(pools, cluster, on_plan),
            interconnect=assembly.interconnect,
            kv_replication=assembly.resends.kv_replication,
        )
        assembly.connect(self.fleet, may_crash=bool(cluster.failures.events or attach))
        if assembly.resends.kv_transfers is not None:
            RoleSwitching(
                roles=cluster.roles,
                fleet=self.fleet,
                clock=self._clock,
                requests_remain=self._requests_remain,
            )
        if cluster.encoders.replicas:
            self.gateway.attach(
                Encoders(cluster.encoders, pools[0], cluster.network, self._clock, cluster.seed)
            )
        if cluster.turns.sleep_level is not None:
            self.gateway.attach(ModelTurns(cluster.turns, self.fleet, self._clock))
        self._migrations = assembly.live_migrations(self._requests_remain)
        self.failure_injector = FailureInjector(
            cluster.failures,
            clock=self._clock,
            fleet=self.fleet,
            seed=cluster.seed,
            on_lost=self._lost,
            requests_remain=self._requests_remain,
        )
        self._overload_stop = self._make_overload_stop() if sim.stop_overloaded else None
        self._missed_slo_stop: MissedSloStop | None = None
        if sim.stop_missed and cluster.slo is not None:
            self._missed_slo_stop = self._make_missed_slo_stop(cluster.slo)
        self._start_autoscalers(pools)

    def _attach_function(
        self,
        pools: Sequence[ReplicaPool],
        cluster: ClusterSettings,
        on_plan: Callable[[StepPlan], None] | None,
    ) -> Callable[[Replica], None]:
        """Returns the function that attaches the listeners that this run needs to each new replica.

        Signals and caches are attached only if a policy reads them.
        """
        clock, resends = self._clock, self._assembly.resends
        kv_replication, kv_transfers = resends.kv_replication, resends.kv_transfers
        readers: list[AdmissionTraits | RoutingTraits] = [
            traits_of(cluster.admission, AdmissionTraits),
            traits_of(cluster.routing, RoutingTraits),
        ]
        scales = any(pool.scaling is not None for pool in pools)
        reads_signals = scales or bool(self._attach)
        if kv_transfers is not None:
            readers.append(traits_of(cluster.decode_routing, RoutingTraits))
            has_mixed = any(pool.role == "mixed" for pool in pools)
            reads_signals = reads_signals or has_mixed or cluster.roles.interval_s is not None
        reads_signals = reads_signals or any(traits.reads_signals for traits in readers)
        reads_caches = any(traits.reads_caches for traits in readers)

        def attach_to(replica: Replica) -> None:
            if replica.core.residents is not None:
                replica.attach(AdapterLoads(replica, clock))
            if kv_replication is not None:
                replica.attach(KvReplicator(replica, kv_replication, clock))
            if kv_transfers is not None:
                kv_transfers.attach(replica)
            if on_plan is not None:
                replica.attach(PlanListener(on_plan))
            if scales:
                self._busy_times[replica.index] = busy_time = BusyTime()
                replica.attach(busy_time)
            if reads_signals:
                replica.signals = signals = Signals(replica, clock, cluster.signal_age_s)
                replica.attach(signals)
            if reads_caches:
                replica.cache_view = view = CacheView(replica, clock)
                replica.attach(view)
            self._assembly.first_tokens.attach_to(replica)
            if self._migrations is not None:
                self._migrations.attach_to(replica)

        return attach_to

    def _make_overload_stop(self) -> OverloadStop:
        """Returns the stop of a run in which the backlog grows without bound."""
        return OverloadStop(
            clock=self._clock,
            requests=self._requests,
            num_ended=lambda: self.num_ended,
            requests_remain=self._requests_remain,
        )

    def _make_missed_slo_stop(self, slo: Slo) -> MissedSloStop | None:
        """Returns the stop of a run in which the SLO is out of reach; None for traffic of unknown length."""
        num_requests, last_s = self._source.num_requests, self._source.last_arrival_s
        if num_requests is None or last_s is None:
            return None
        return MissedSloStop(
            slo=slo,
            num_requests=num_requests,
            last_arrival_s=last_s,
            clock=self._clock,
            requests=self._requests,
            requests_remain=self._requests_remain,
        )

    def _start_autoscalers(self, pools: Sequence[ReplicaPool]) -> None:
        for index, pool in enumerate(pools):
            if pool.scaling is not None:
                Autoscaler(
                    pool.scaling,
                    pool_index=index,
                    cold_start_s=pool.cold_start_s,
                    clock=self._clock,
                    fleet=self.fleet,
                    counts=self._assembly.pool_counts.of_pool[index],
                    busy_times=self._busy_times,
                    on_start=self.failure_injector.add,
                    requests_remain=self._requests_remain,
                )

    @property
    def clock(self) -> Clock:
        """The SimPy environment of the run."""
        return self._clock

    @property
    def migrates(self) -> bool:
        """True if running requests may move to other replicas."""
        return self._migrations is not None

    @property
    def replicas(self) -> list[Replica]:
        """All replicas of the run, also those that have gone, by index."""
        return self.fleet.replicas

    def _requests_remain(self) -> bool:
        """Returns whether requests are in progress or still to arrive."""
        return self._num_ahead > 0

    def run(self, report: Callable[[float, int], None] | None = None) -> RunRecords:
        """Runs until all requests have ended, until_s, or Ctrl-C; returns the records up to then.

        report(simulated time in seconds, number of ended requests) is called periodically.
        """
        clock = self._clock
        clock.begin(self._arrive_in_turn())
        try:
            if isinstance(self._source, NumberedSource):
                begin_processes(self._attach, self, self._source)
                if not self._num_ahead:
                    self._clock.at(0.0, AFTER_USERS, self._end_attached)
            with ctrl_c_noted() as interrupt, gc_paused():
                while True:
                    while clock.run_some(EVENTS_BETWEEN_REPORTS, self._until_s, interrupt):
                        if report:
                            report(clock.now, self.num_ended)
                        self._recording.hand_on(self)
                    if not self._num_ahead or clock.peek() < inf or not self._end_traffic():
                        break
        except (Exception, SystemExit) as error:
            note_time(error, clock.now)
            of_user = unhandled(error, clock.now) if self._attach else None
            if of_user is not None:
                raise of_user from error
            raise
        is_early = interrupt.noted or clock.is_stopped or isinf(self._until_s)
        stopped_s = clock.now if is_early else self._until_s
        end_s = stopped_s if self._num_ahead else self.last_end_s
        if report:
            report(end_s, self.num_ended)
        return self._end(end_s, interrupted=interrupt.noted or self._is_cut_short)

    def stop(self) -> None:
        """Ends the run before the next event, as Ctrl-C does."""
        self._is_cut_short = True
        self._clock.stop()

    def _end_traffic(self) -> bool:
        """Makes replicas serve held-back requests because no other event will occur; True if any does."""
        waiting = [replica for replica in self.fleet.replicas if replica.core.end_traffic()]
        for replica in waiting:
            replica.replan()
        return bool(waiting)

    def _end(self, end_s: float, *, interrupted: bool) -> RunRecords:
        """Ends the run at end_s; returns its records."""
        self.is_unfinished = self._requests_remain()
        for replica in self.fleet.replicas:
            replica.stop(end_s)
        self.gateway.stop(end_s)
        return self._recording.end(self, end_s, interrupted=interrupted)

    def _arrive_in_turn(self) -> ProcessGenerator:
        """Processes all open-loop arrivals; only one is read ahead, so a long trace needs no memory."""
        for arrival in self._arrivals:
            self._next = arrival
            self._num_ahead += 1
            yield self._clock.at(arrival.at_s, ARRIVE)
            self._arrive(arrival)
        self._next = None

    def _arrive(self, arrival: Arrival) -> None:
        """Passes a request to the gateway, and schedules the time at which its client gives up, if any."""
        self.gateway.arrive(arrival)
        if arrival.gives_up_s is not None:
            self._clock.begin(self._give_up_at(arrival.gives_up_s, arrival.request.request_id))

    def _arrive_at(self, time_s: float, arrival: Arrival) -> ProcessGenerator:
        """Schedules the arrival of a request after its client's think time or tool call."""
        yield self._clock.at(time_s, ARRIVE)
        self._arrive(arrival)

    def _give_up_at(self, time_s: float, request_id: int) -> ProcessGenerator:
        """Aborts a request at time_s, or now if that has passed, unless it has ended by then."""
        yield self._clock.at(max(time_s, self._clock.now), ARRIVE)
        attempt = self.gateway.attempts.get(request_id)
        if attempt is not None:
            self.gateway.give_up(attempt)

    def _lost(self, request_id: int) -> None:
        """Resends or fails a request lost in a crash of its replica."""
        self._assembly.resends.lost(request_id)

    def _follow_up(self, request: Request) -> None:
        """Counts an ended request, and schedules its follow-ups, if any."""
        self.num_ended += 1
        self._num_ahead -= 1
        self.last_end_s = self._clock.now
        num_output_tokens = self._requests.output_tokens[request.request_id]
        for arrival in self._source.follow_ups(request, self._clock.now, num_output_tokens):
            self._num_ahead += 1
            self._clock.begin(self._arrive_at(arrival.at_s, arrival))
        if self._attach and not self._num_ahead:
            self._clock.at(self._clock.now, AFTER_USERS, self._end_attached)

    def send(self, arrival: Arrival) -> None:
        """Adds a request of a user process that arrives now."""
        self._num_ahead += 1
        self._clock.begin(self._arrive_at(self._clock.now, arrival))

    def status_of(self, request_id: int) -> str:
        """Returns the name of the status of a request that has arrived."""
        return Status(self._requests.status[request_id]).name

    def _end_attached(self, event: Event) -> None:
        """Ends the user processes after the last request, unless they have sent another one."""
        if not self._num_ahead:
            self._clock.end_users()

    def figures(self, end_s: float) -> dict[str, Any]:
        """Returns the fields of `RunRecords` that are no tables, for a run that ends at end_s."""
        pool_records, replica_records = self.fleet.records(end_s)
        engines = [
            (replica.index, engine)
            for replica in self.fleet.replicas
            for engine in (*replica.recorder.lost_engines, EngineRecord.of(replica.core, end_s))
        ]
        unfilled = [np.insert(e.unfilled, 0, index, axis=1) for index, e in engines if e.unfilled is not None]
        return {
            "pools": pool_records,
            "replicas": replica_records,
            "end_s": end_s,
            "overload": None if self._overload_stop is None else self._overload_stop.found,
            "missed": None if self._missed_slo_stop is None else self._missed_slo_stop.found,
            "pinned_token_s": sum(engine.pinned_token_s for _, engine in engines),
            "num_evicted_blocks": sum(engine.num_evicted for _, engine in engines),
            "num_discarded_tokens": sum(engine.num_discarded for _, engine in engines),
            "unfilled": np.concatenate(unfilled) if len(unfilled) == len(engines) else None,
            "adapters": [engine.adapters for _, engine in engines if engine.adapters is not None],
            "num_lost_first_tokens": self._requests.num_lost_first_tokens,
            "num_crash_tokens": self._requests.num_crash_tokens,
            "failures": tuple(self.failure_injector.happened),
            "num_resends": self._requests.num_resends,
            "recovery": self._recovered(),
            "failed_attempts": dict(self._requests.failed_attempts),
            "migrations": None if self._migrations is None else self._migrations.all_records(),
            "links": ()
            if self._assembly.interconnect is None
            else self._assembly.interconnect.records(end_s),
        }

    def _recovered(self) -> RecoveryRecord:
        log, kv_replication = self._requests, self._assembly.resends.kv_replication
        record = RecoveryRecord(log.num_resumed, log.num_recomputed_tokens)
        if kv_replication is None:
            return record
        return record._replace(
            replicated_bytes=kv_replication.replicated_bytes,
            num_restored_tokens=kv_replication.num_restored_tokens,
            restored_bytes=kv_replication.restored_bytes,
        )
