"""A simulation whose requests come from outside while it runs, such as from the clients of a server.

The caller owns the time: it advances the simulation to the present, adds requests, and receives every token.
Every iteration is one event, because a caller that streams tokens must see each token at its time. The times
are the same as with leaps (`sim/engine/replica.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf, nextafter
from typing import Any, NamedTuple, Protocol

from policies.adapters.serving import Adapter
from policies.core.plan import StepPlan
from policies.core.request import Request
from policies.core.sequence import Sequence as EngineSequence
from sim.cluster.disaggregation import KeptPrefills
from sim.cluster.fleet import State
from sim.cluster.recording import RecordedRun, tables, whole_records
from sim.cluster.settings import ClusterSettings, SimSettings
from sim.cluster.simulation import Simulation
from sim.engine.attachment import Attachment
from sim.engine.clock import Interrupt
from sim.engine.iteration_times import RunningStep
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool
from sim.records.event_rows import EventRows
from sim.records.iterations import IterationLog
from sim.records.requests import RequestLog, Status
from sim.records.run import RunRecords
from sim.workload.base import Arrival, WorkloadNotes
from sim.workload.recording import TrafficLog


class Ended(NamedTuple):
    """The end of a request.

    reason: the reason of a rejection, or "length" if a limit has ended the output.
    """

    status: Status
    reason: str
    num_output_tokens: int


class Listener(Protocol):
    """Receives the events of a live simulation's requests, at their simulated times."""

    def progressed(self, request_id: int, num_output_tokens: int) -> None:
        """Handles new output tokens; num_output_tokens counts all tokens of the request so far."""

    def ended(self, request: Request, end: Ended) -> None:
        """Handles the end of a request: it is complete, was aborted, or was rejected."""

    def lost_tokens(self, request_id: int) -> None:
        """Handles a crash after which a request restarts although some of its tokens have been reported.

        Its tokens are reported again only from the first new one on.
        """


class LiveSource:
    """The traffic of a live simulation: it is not known in advance."""

    num_requests: int | None = None
    last_arrival_s: float | None = None
    patience_s: float | None = None

    def __init__(self) -> None:
        self.notes = WorkloadNotes()

    def arrivals(self) -> Iterator[Arrival]:
        return iter(())

    def follow_ups(self, request: Request, now: float, num_output_tokens: int) -> Sequence[Arrival]:
        return ()


class LiveRecording:
    """Keeps the records of a live run until they are closed, which may be before the run ends."""

    def __init__(self) -> None:
        self.requests = RequestLog()
        self._ended: tuple[RequestLog, list[IterationLog], list[EventRows], dict[str, Any]] | None = None

    @property
    def have_ended(self) -> bool:
        """True if current events are not recorded."""
        return self._ended is not None

    def end_now(self, run: RecordedRun) -> None:
        """Keeps the records up to now."""
        now, requests = run.clock.now, self.requests.copied()
        cuts = [
            replica.recorder.cut(requests, replica.intake.entries(), now) for replica in run.fleet.replicas
        ]
        self._ended = requests, [log for log, _ in cuts], [rows for _, rows in cuts], run.figures(now)

    def hand_on(self, run: RecordedRun) -> None:
        """Does nothing: no records are flushed before the end."""

    def end(self, run: RecordedRun, end_s: float, *, interrupted: bool) -> RunRecords:
        """Returns the records up to the call of `end_now`, or up to end_s without it."""
        if self._ended is None:
            return whole_records(self.requests, run, run.figures(end_s), interrupted=interrupted)
        return tables(*self._ended, interrupted=interrupted)


class LiveSimulation(Simulation):
    """One run of the replicas of all pools, with requests from outside.

    pools, cluster: as for `Simulation`. attach: called with every new replica, for attachments of the caller.
    """

    def __init__(
        self,
        *,
        pools: Sequence[ReplicaPool],
        cluster: ClusterSettings,
        listener: Listener,
        attach: Callable[[Replica], None] | None = None,
    ) -> None:
        self._listener = listener
        self._attach_own = attach
        self._due: list[TokenFeed] = []  # feeds of the replicas that end an iteration with the current event
        self._feeds: list[TokenFeed] = []
        self._num_emitted: dict[int, int] = {}  # output tokens of the requests in progress, by request id
        self._is_open = True
        self.traffic = TrafficLog()
        """The requests in order of arrival, until the records are closed; the run can be repeated from them.
        """
        self._records = LiveRecording()
        self._never = Interrupt()
        self._keeps_tokens = cluster.recovery.keeps_tokens
        self.kept_prefills: KeptPrefills | None = None
        """The kept prefills; None: the run has no prefill pools."""
        super().__init__(
            source=LiveSource(),
            pools=pools,
            cluster=cluster,
            sim=SimSettings(leap=False),
            recording=self._records,
        )
        self.kept_prefills = self._assembly.kept_prefills()
        self._assembly.first_tokens.on_notify = self._on_first_token

    @property
    def now(self) -> float:
        """Simulated time in seconds up to which the simulation has advanced."""
        return self._clock.now

    @property
    def next_event_s(self) -> float:
        """Time of the next event in seconds; inf: nothing happens until a request arrives."""
        return self._clock.peek()

    @property
    def requests(self) -> RequestLog:
        """The records of all requests so far, read-only."""
        return self._requests

    @property
    def num_in_progress(self) -> int:
        """Number of requests that have arrived and have not ended."""
        return len(self._num_emitted)

    def add(self, arrival: Arrival) -> None:
        """Adds a request, which arrives at `at_s`, or just after `now` if that has passed.

        It does not arrive at `now` itself, because the plans of that time are already made: a run with this
        arrival known in advance would include it in them. Request ids count from 0.
        """
        request_id = arrival.request.request_id
        self._num_ahead += 1
        self._num_emitted[request_id] = 0
        at_s = arrival.at_s if arrival.at_s > self.now else nextafter(self.now, inf)
        if not self._records.have_ended:
            self.traffic.add(arrival.request, arrival.num_output_tokens, at_s)
        self._clock.begin(self._arrive_at(at_s, arrival))

    def abort(self, request_id: int, at_s: float) -> None:
        """Aborts a request whose client has gone, at at_s, or just after `now` if that has passed.

        `ended` follows, possibly after an iteration, unless the request has already ended. A request that is
        added and aborted at the same time arrives first.
        """
        if request_id not in self._num_emitted:
            return
        soonest_s = nextafter(nextafter(self.now, inf), inf)  # after requests that are added now
        time_s = max(at_s, soonest_s)
        if not self._records.have_ended:
            time_s = max(time_s, self.traffic.time_s(request_id))
            self.traffic.abort(request_id, time_s)
        self._clock.begin(self._give_up_at(time_s, request_id))

    def advance(self, until_s: float, max_events: int) -> bool:
        """Processes the events that are due by until_s; returns False if some are left after max_events."""
        clock, due, never = self._clock, self._due, self._never
        for _ in range(max_events):
            if not clock.run_some(1, until_s, never):
                return True
            if due:
                for feed in due:
                    feed.emit()
                due.clear()
        return False

    def start_cold(self) -> None:
        """Starts all replicas now: each serves after the cold start of its pool."""
        self.traffic.remark("a cold start")
        for member in self.fleet.members:
            self.fleet.start_again(member, self.now)
            self.fleet.serve_after(member, member.replica.pool.cold_start_s)

    def serve_adapter(self, adapter: Adapter) -> None:
        """Makes all replicas serve one more LoRA adapter.

        Engines created later get it from the adapter list of their pool.
        """
        for replica in self.fleet.replicas:
            if replica.core.residents is not None:
                replica.core.residents.serve(adapter)

    def clear_prefix_caches(self) -> None:
        """Evicts the KV that no running request uses from all GPUs.

        Other memory tiers keep their contents.
        """
        self.traffic.remark("its prefix caches cleared")
        for replica in self.fleet.replicas:
            replica.core.block_pool.clear_cache()

    def empty_engines(self) -> None:
        """Replaces all engines by empty ones with free KV memory; no request may be in progress."""
        assert not self.num_in_progress
        self.traffic.remark("engines that slept")
        for member in self.fleet.members:
            if member.state is State.serving:
                member.replica.crash()

    @property
    def num_record_bytes(self) -> int:
        """Memory of the records that grow while the simulation runs, bytes."""
        recorders = (replica.recorder for replica in self.fleet.replicas)
        logs = self._requests.num_bytes + sum(recorder.num_bytes for recorder in recorders)
        return logs + self.traffic.num_bytes

    def end_records(self) -> None:
        """Closes the records now; later events are not included, and `discard_records` drops them.

        Requests in progress are unfinished in the records. From now on, the id of a request that has ended
        may be that of a new one after `RequestLog.clear`.
        """
        self._records.end_now(self)

    def discard_records(self) -> None:
        """Drops the logs of iterations and events since `end_records`."""
        for replica in self.fleet.replicas:
            replica.recorder.discard()
            unfilled = replica.core.block_pool.unfilled
            if unfilled is not None:
                del unfilled[:]

    def close(self) -> RunRecords:
        """Ends the run now, with unfinished requests as they are; returns the records."""
        self._is_open = False
        return self._end(self._clock.now, interrupted=False)

    def emitted(self, request_id: int, num_tokens: int) -> None:
        """Reports that a request has num_tokens output tokens, if its client has seen fewer.

        A request that restarts after a crash repeats tokens that its client already has.
        """
        if num_tokens > self._num_emitted.get(request_id, num_tokens):
            self._num_emitted[request_id] = num_tokens
            self._listener.progressed(request_id, num_tokens)

    def _attach_function(
        self,
        pools: Sequence[ReplicaPool],
        cluster: ClusterSettings,
        on_plan: Callable[[StepPlan], None] | None,
    ) -> Callable[[Replica], None]:
        attach_first = super()._attach_function(pools, cluster, on_plan)

        def attach_to(replica: Replica) -> None:
            attach_first(replica)
            feed = TokenFeed(self._requests, self._due, self.emitted)
            self._feeds.append(feed)
            replica.attach(feed)
            if self._attach_own is not None:
                self._attach_own(replica)

        return attach_to

    def _on_first_token(self, request_id: int) -> None:
        """Reports the tokens of a request's replica; its first token may have arrived with its KV."""
        self._due.extend(feed for feed in self._feeds if feed.follows(request_id))

    def _requests_remain(self) -> bool:
        return self._is_open

    def _lost(self, request_id: int) -> None:
        if self.kept_prefills is not None and self.kept_prefills.lost(request_id):
            return
        if self._num_emitted.get(request_id) and not self._keeps_tokens:
            self._listener.lost_tokens(request_id)
        super()._lost(request_id)

    def _follow_up(self, request: Request) -> None:
        request_id, log = request.request_id, self._requests
        self.emitted(request_id, log.output_tokens[request_id])
        del self._num_emitted[request_id]
        status = Status(log.status[request_id])
        end = Ended(status, log.reason.get(request_id, ""), log.output_tokens[request_id])
        super()._follow_up(request)
        self._listener.ended(request, end)


class TokenFeed(Attachment):
    """Reports the output tokens of a replica's sequences after each iteration.

    due: the list to which the feed adds itself when its replica is about to end an iteration; call `emit`
    after that. on_tokens(request_id, num_tokens) is called for every sequence of the engine that may have new
    tokens.
    """

    def __init__(
        self, requests: RequestLog, due: list[TokenFeed], on_tokens: Callable[[int, int], None]
    ) -> None:
        self._requests = requests
        self._due = due
        self._on_tokens = on_tokens
        self._sequences: dict[int, EngineSequence] = {}

    def follows(self, request_id: int) -> bool:
        """Returns whether the engine has a request."""
        return request_id in self._sequences

    def entered(self, seq: EngineSequence) -> None:
        self._sequences[seq.request_id] = seq

    def left(self, seq: EngineSequence) -> None:
        self._sequences.pop(seq.request_id, None)

    def crashed(self, now: float) -> None:
        self._sequences.clear()

    def ending(self, step: RunningStep, now: float) -> None:
        self._due.append(self)

    def emit(self) -> None:
        """Reports the tokens of all sequences; the KV of a held-back token has not arrived yet.

        The newest sequences come first, so a first token does not wait for the others.
        """
        prompt_tokens, held_back, on_tokens = (
            self._requests.prompt_tokens,
            self._requests.held_back,
            self._on_tokens,
        )
        for request_id, seq in reversed(list(self._sequences.items())):
            num_tokens = seq.num_known - prompt_tokens[request_id]
            if num_tokens > 0:
                on_tokens(request_id, num_tokens - (request_id in held_back))
