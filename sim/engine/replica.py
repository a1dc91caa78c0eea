"""One engine in simulated time: plan, wait as long as the hardware model says, commit.

A plan that holds for several iterations is run as one event (a leap). What comes from outside in the middle
of a leap cuts it: the leap then ends at the first iteration boundary that is not earlier, exactly where a
simulation of single iterations would have seen it.

Above 400 lines, as what a leap is, what cuts it and what is seen in the middle of it belong together; when
tokens came is in `last_tokens`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, takewhile
from math import inf, isnan

import numpy as np
from simpy import Event

from hwmodels.iterations.iteration import IterationShape
from policies.core.limits import Bounds, StopAfter
from policies.core.plan import Migrant, StepOutcome, StepPlan, Transfer
from policies.core.request import Request
from policies.core.sequence import FinishReason, Sequence, SequenceState
from sim.engine.attached import KvHandovers, KvMirrors, ReplicaLinks
from sim.engine.clock import Clock, Phase
from sim.engine.flight import Flight
from sim.engine.last_tokens import LastTokens
from sim.engine.pool import Pool
from sim.engine.shape import shape_of
from sim.engine.signals import Counts, Signals
from sim.records.events import EventLog
from sim.records.iterations import IterationLog
from sim.records.requests import RequestLog, Status
from sim.records.run import EngineRecord

MAX_LEAP = 1024  # iterations priced at once: a leap that is cut has wasted the rest


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What the replicas of a run share.

    on_end is called with every sequence that ends. leap=False runs iteration by iteration. seed: of the
    world's choices. on_plan is shown every plan, and who was preempted by it, before its first iteration.
    on_first_token is called with every sequence that has produced one. signal_age_s: see `Signals`; None:
    nobody reads them. are_looked_into: somebody asks for `num_cached`.
    """

    clock: Clock
    requests: RequestLog
    on_end: Callable[[Sequence], None]
    leap: bool = True
    seed: int = 0
    on_plan: Callable[[StepPlan], None] | None = None
    on_first_token: Callable[[Sequence], None] | None = None
    signal_age_s: float | None = None
    are_looked_into: bool = False
    handovers: KvHandovers[Replica] | None = None
    """Moves on what replicas of a prefill pool have computed; None: there is no such pool."""
    interconnect: ReplicaLinks | None = None
    """The network that KV travels on between replicas; None: KV does not travel."""
    mirrors: KvMirrors[Replica] | None = None
    """Copies KV in case a replica crashes; None: KV is not copied."""


class Replica:
    """Drives an EngineCore on the clock and writes down what happens. It is a `policies.routing.ReplicaView`.

    A crash loses the engine and all that it was doing, and puts an empty one in its place.
    """

    def __init__(self, index: int, pool: Pool, around: Surroundings) -> None:
        self.index = index
        self.pool = pool
        self.price_usd_per_hour = pool.price_usd_per_hour
        self.num_outstanding = 0  # what a router counts itself: see `ReplicaView`
        self.num_outstanding_tokens = 0
        self.num_queued_tokens = 0
        self.core = pool.core()
        self.lost_engines: list[EngineRecord] = []  # in crashes
        self.num_kv_tokens = self.core.pool.num_blocks * self.core.pool.block_size
        self.iterations = IterationLog(index, self.core.pool.block_size, self.core.residents is not None)
        self.events = EventLog(pool.frontend_s)
        self._model = pool.model
        self._clock = around.clock
        self._requests = around.requests
        self._on_end = around.on_end
        self._on_first_token = around.on_first_token
        self._max_leap = MAX_LEAP if around.leap else 1
        self._slowdown = 1.0
        self._busy_s = 0.0  # before it last began to be busy without a break: from when until when
        self._busy_from_s = self._busy_until_s = 0.0
        self._flight: Flight | None = None
        self._timer: Event | None = None  # the one event that counts; a cut leaves its predecessor void
        self._wakes = False  # the timer is the policies' wish to be asked again later
        self._links = pool.links()
        self._life = 0  # how often it has crashed: what was to happen in an earlier life does not
        self._aborts: list[int] = []
        self._handovers = around.handovers
        self._mirrors = around.mirrors
        self._is_mirrored = around.mirrors is not None and pool.role != "prefill"
        self._mirror_timer: Event | None = None  # the one that counts
        self._resumed: set[int] = set()  # request ids: they go on, and have no token from here yet
        self._num_mirrored = 0  # iterations after the last of which KV was copied
        self._interconnect = around.interconnect
        self._hands_over = pool.role == "prefill"
        self._prefill_s: dict[int, float] = {}  # by request id: time of its chunks, shared out by tokens
        self._incoming: dict[int, float] = {}  # by request id: handed over to this one, when; no KV here yet
        self._new_incoming: set[int] = set()  # of these, who has been in no plan yet
        self._departures: list[int] = []  # request ids: their KV has been copied
        self._drops: dict[int, Callable[[], None]] = {}  # by request id: what to do when it has gone
        self._frontend_s = pool.frontend_s
        self._plans_ahead = pool.plans_ahead
        self._on_plan_made = around.on_plan
        self._signal_age_s = around.signal_age_s
        self._signals = self._new_signals()
        self._is_looked_into = around.are_looked_into
        self._num_sent = self._num_sent_tokens = 0  # since the engine began
        self._num_entered = self._num_entered_tokens = 0  # of these, known to the engine
        self._on_the_way: dict[int, Request] = {}  # by id: not known to the engine yet
        self._given_up: set[int] = set()  # of these
        self._last_tokens = LastTokens(self.core, self._requests, around.seed)

    @property
    def kv_bytes_per_token(self) -> float:
        """Of KV, as the ways between memory tiers carry it."""
        return self._links.bytes_per_token

    def _new_signals(self) -> Signals | None:
        return None if self._signal_age_s is None else Signals(self.core, self._signal_age_s)

    @property
    def _seen(self) -> Counts:
        """What the signals say."""
        if self._signals is None:
            raise RuntimeError(
                "signals: the routing policy must declare reads_signals: ClassVar[bool] = True"
            )
        return self._signals.read(self._clock.now)

    @property
    def num_running(self) -> int:
        """Sequences with a slot, as far as the signals tell."""
        return self._seen.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, as far as the signals tell."""
        return self._seen.num_waiting

    @property
    def num_free_kv_tokens(self) -> int:
        """Tokens for which KV memory is free, as far as the signals tell."""
        pool = self.core.pool
        return (pool.num_blocks - self._seen.num_blocks_used) * pool.block_size

    @property
    def num_unseen(self) -> int:
        """Requests sent here that the signals do not count yet."""
        return self._num_sent - self._seen.num_entered

    @property
    def num_unseen_tokens(self) -> int:
        """Prompt tokens of those."""
        return self._num_sent_tokens - self._seen.num_entered_tokens

    def num_cached(self, request: Request) -> int:
        """Tokens of a prompt that the cache has, as of the last iteration that has begun.

        Raises RuntimeError unless the run's surroundings say that replicas are looked into.
        """
        if not self._is_looked_into:
            raise RuntimeError(
                "num_cached: the routing policy must declare reads_caches: ClassVar[bool] = True"
            )
        self._settle()
        return self.core.pool.peek(request)

    def has_adapter(self, name: str) -> bool:
        """Whether an adapter is on its GPU, or on its way there."""
        return self.core.residents is not None and self.core.residents.is_resident(name)

    def submit(self, request: Request, stop_after: StopAfter, migrant: Migrant | None = None) -> None:
        """Take in a request that ends, each branch of it, after stop_after tokens. Raises RejectedError.

        migrant: with what it goes on where a replica that crashed had got; `EngineCore.check_migrant` allows
        it. What it has computed is with the mirrors.
        """
        num_tokens = request.prompt.num_tokens
        num_queued = num_tokens if isnan(self._requests.first_token_s[request.request_id]) else 0
        bounds = self.core.bounds_of(request, stop_after)
        add = partial(self._add, request, stop_after, bounds, migrant)
        if request.request_id in self._departures:  # its last attempt has not left: it comes back behind it
            assert self._flight is not None
            boundary_s = self._flight.ends_s[bisect_left(self._flight.ends_s, self._clock.now)]
            self._note_sent(num_tokens)
            self.num_queued_tokens += num_queued
            self._on_the_way[request.request_id] = request
            self._later(boundary_s, Phase.arrive, partial(self._reach_engine, request.request_id, add))
            return
        if not (self._frontend_s or self._plans_ahead):
            add(False)
            self._note_sent(num_tokens)
            self.num_queued_tokens += num_queued
            return
        self._note_sent(num_tokens)
        self.num_queued_tokens += num_queued
        self._on_the_way[request.request_id] = request
        if self._frontend_s:
            known_s = self._clock.now + self._frontend_s
            self._later(known_s, Phase.arrive, partial(self._reach_engine, request.request_id, add))
        else:
            self._reach_engine(request.request_id, add)

    def adopt(self, migrant: Migrant, stop_after: StopAfter) -> None:
        """Take in a sequence that another replica has handed over. Raises RejectedError."""
        request, now = migrant.request, self._clock.now
        self.core.check_migrant(request, migrant.num_known, stop_after)
        self._note_sent(request.prompt.num_tokens)
        self._incoming[request.request_id] = now
        self._on_the_way[request.request_id] = request
        self._reach_engine(request.request_id, partial(self._adopt, migrant, stop_after, now))

    def receive(self, request_id: int) -> None:
        """The KV of a sequence that was handed over is here."""
        del self._incoming[request_id]
        self._on_loaded(request_id)

    def fetched(self, request_id: int) -> None:
        """KV of a sequence that came from a replica that crashed is here."""
        assert self._mirrors is not None
        if self._mirrors.fetched(request_id):
            self._on_loaded(request_id)

    def let_go(self, request_id: int) -> None:
        """A sequence that was handed over from here needs its KV no more: as `abort`."""
        if self._flight is None:
            self._depart(request_id)
            self._look_up()
        else:
            self._settle()
            self._departures.append(request_id)
            self._look_up()

    def drop(self, request_id: int, then: Callable[[], None]) -> None:
        """Let a sequence go that waits here for KV that will not come; then do something else about it."""
        if request_id in self._aborts or request_id in self._given_up:
            return  # its client has given it up already
        self._drops[request_id] = then
        self.abort(request_id)

    def _note_sent(self, num_tokens: int) -> None:
        """Count a request that was taken in."""
        self.num_outstanding += 1
        self.num_outstanding_tokens += num_tokens
        self._num_sent += 1
        self._num_sent_tokens += num_tokens

    def _reach_engine(self, request_id: int, add: Callable[[bool], None]) -> None:
        """Give a request to the engine; to one that plans ahead, behind the plan that it has made already."""
        now = self._clock.now
        if self._plans_ahead and (self._flight is not None or (self._timer is not None and not self._wakes)):
            flight = self._flight
            planned_s = now if flight is None else flight.ends_s[bisect_left(flight.ends_s, now)]
            self._later(planned_s, Phase.late, partial(self._enter, request_id, add))
        else:
            self._enter(request_id, add)

    def _later(self, time_s: float, phase: int, action: Callable[[], None]) -> None:
        """Do it then, unless the engine crashes before."""
        life = self._life

        def act(event: Event) -> None:
            if self._life == life:
                action()

        self._clock.at(time_s, phase, act)

    def _enter(self, request_id: int, add: Callable[[bool], None]) -> None:
        add(self._plans_ahead)
        del self._on_the_way[request_id]
        if request_id in self._given_up:
            self._given_up.remove(request_id)
            self._give_up(request_id, is_late=self._plans_ahead)

    def _add(
        self,
        request: Request,
        stop_after: StopAfter,
        bounds: Bounds,
        migrant: Migrant | None,
        is_late: bool,
    ) -> None:
        self._settle(is_late)
        if migrant is None:
            seq = self.core.add(request, stop_after, bounds)
        else:
            seq = self.core.adopt(migrant, stop_after, "mirror")
            self._resumed.add(request.request_id)
        self.events.enter(seq)
        self._num_entered += 1
        self._num_entered_tokens += request.prompt.num_tokens
        self._look_up(is_late)

    def _adopt(self, migrant: Migrant, stop_after: StopAfter, sent_s: float, is_late: bool) -> None:
        self._settle(is_late)
        seq = self.core.adopt(migrant, stop_after)
        self.events.adopt(seq, sent_s)
        self._new_incoming.add(seq.request_id)
        self._num_entered += 1
        self._num_entered_tokens += seq.num_prompt_tokens
        self._look_up(is_late)

    def take_iterations(self) -> IterationLog:
        """The log of its iterations; it is given up, as all of them are large."""
        log = self.iterations
        self.iterations = IterationLog(self.index, log.block_size, log.serves_adapters)
        return log

    def abort(self, request_id: int) -> None:
        """Give a request up: now if no iteration is under way, else at the next iteration boundary."""
        if request_id in self._on_the_way:
            self._given_up.add(request_id)
        else:
            self._give_up(request_id)

    def stop(self, now: float) -> None:
        """End the simulation: enter the iterations that have ended by now, and how far the rest has come."""
        flight = self._flight
        if flight is not None:
            num_ended = bisect_right(flight.ends_s, now)
            if num_ended:
                flight.num_iterations = num_ended
                self._commit(flight)
        for seq in self.core.unfinished:
            if self._requests.replica[seq.request_id] == self.index:  # else it is going on elsewhere
                self._requests.note(seq, self._last_tokens.last_s(seq))
            self.events.leave(seq, now)
        for request in self._on_the_way.values():
            self.events.never_met(request, now, sent_s=self._incoming.get(request.request_id))

    def crash(self) -> list[int]:
        """Lose the engine at this instant; returns the requests that it had taken in, by id.

        What its iterations up to now have produced was sent to the clients.
        """
        now = self._clock.now
        flight, self._flight, self._timer = self._flight, None, None
        self._mirror_timer = None
        if flight is not None:
            num_ended = bisect_right(flight.ends_s, now)
            if num_ended:
                flight.num_iterations = num_ended
                self._commit(flight)
            self._busy_until_s = now
        lost = [seq for seq in self.core.unfinished if seq.request_id not in self._departures]
        for seq in lost:
            if seq.request_id not in self._incoming:  # else its first token and its KV are safe
                self._requests.note(seq, self._last_tokens.last_s(seq))
                if seq.state is not SequenceState.loading:
                    self._requests.lose_kv(seq.request_id, seq.num_computed)
            self.events.leave(seq, now, is_lost=True)
        for request in self._on_the_way.values():
            sent_s = self._incoming.get(request.request_id)
            self.events.never_met(request, now, is_lost=True, sent_s=sent_s)
        self.events = EventLog(self._frontend_s, after=self.events)
        request_ids = [*(seq.request_id for seq in lost), *self._on_the_way]
        self._life += 1
        self._on_the_way.clear()
        self._given_up.clear()
        self._aborts.clear()
        self._departures.clear()
        self._drops.clear()
        self._incoming.clear()
        self._new_incoming.clear()
        self._prefill_s.clear()
        self._resumed.clear()
        self.num_outstanding = self.num_outstanding_tokens = self.num_queued_tokens = 0
        self._num_sent = self._num_sent_tokens = self._num_entered = self._num_entered_tokens = 0
        num_iterations = self.core.num_iterations
        self.lost_engines.append(EngineRecord.of(self.core, now))
        self.core = self.pool.core()
        self.core.num_iterations = self.core.pool.num_iterations = num_iterations
        self._last_tokens.begin_anew(self.core)
        self._links = self.pool.links()
        self._signals = self._new_signals()
        return sorted(request_ids)

    def slow_links(self, factor: float) -> None:
        """Let copies take `factor` times as long: between memory tiers those that begin from now on."""
        self._links.slowdown = factor
        if self._interconnect is not None:
            self._interconnect.slow_links(self.index, factor)

    def busy_s(self, now: float) -> float:
        """Seconds with an iteration running, up to now: the same however the run was cut into leaps."""
        until_s = self._busy_until_s if self._flight is None else now
        return self._busy_s + (until_s - self._busy_from_s)

    def slow_down(self, factor: float) -> None:
        """Let iterations take `factor` times as long, from the next on that begins; 1: as they should."""
        if factor != self._slowdown:
            self._settle()
            self._slowdown = factor
            self._look_up()

    def _give_up(self, request_id: int, is_late: bool = False) -> None:
        if self._flight is None:
            self._abort(request_id)
            if self.core.num_waiting:  # perhaps for what it held
                self._look_up(is_late)
        else:
            self._settle(is_late)
            self._aborts.append(request_id)
            self._look_up(is_late)

    def _look_up(self, is_late: bool = False) -> None:
        """Something came from outside: plan anew at the first iteration boundary that is not in the past.

        is_late: a boundary at this very instant has passed, its plan is made.
        """
        flight = self._flight
        if flight is None:
            if self._timer is None or self._wakes:
                self._plan_soon()
            return
        if flight.num_iterations > 1:
            bisect = bisect_right if is_late else bisect_left
            boundary = bisect(flight.ends_s, self._clock.now)
            if boundary + 1 < flight.num_iterations:
                self._leave_after(flight, boundary + 1)

    def _leave_after(self, flight: Flight, num_iterations: int) -> None:
        flight.num_iterations = num_iterations
        end_s = flight.ends_s[num_iterations - 1]
        self._timer = self._clock.at(end_s, self.index, self._on_boundary)

    def _settle(self, is_late: bool = False) -> None:
        """Cut a leap behind the iterations that have ended, if they have changed what the cache holds.

        For whoever looks into the cache in the middle of a leap. The cut must come before anything else comes
        from outside: the plan made there must not know of it.
        """
        flight = self._flight
        if not self._is_looked_into or flight is None or flight.num_iterations == 1:
            return
        core, plan, now = self.core, flight.plan, self._clock.now
        num_ended = (bisect_right if is_late else bisect_left)(flight.ends_s, now)
        num_ended = min(num_ended, flight.num_iterations - 1)
        if not num_ended:
            return
        if not plan.chunks and core.blocks_of_repeats(plan, num_ended) <= core.pool.num_blank:
            return  # nothing was evicted
        if self._signals is not None:
            self._signals.refresh(now)
        flight.num_iterations = num_ended
        self._flight = self._timer = None
        self._commit(flight)
        self._plan(flight.ends_s[num_ended - 1])

    def _on_boundary(self, event: Event) -> None:
        if event is not self._timer:
            return
        self._timer = None
        flight = self._flight
        assert flight is not None
        self._flight = None
        self._commit(flight)
        if self._aborts:
            for request_id in self._aborts:
                self._abort(request_id)
            self._aborts.clear()
        if self._departures:
            for request_id in self._departures:
                self._depart(request_id)
            self._departures.clear()
        if self._clock.peek() > self._clock.now:
            self._plan(self._clock.now)
        else:  # others act at this very instant: plan after them
            self._plan_soon()

    def _plan_soon(self, time_s: float | None = None) -> None:
        """Plan at this instant, after all that happens at it; or later, if nothing happens before."""
        self._wakes = time_s is not None
        time_s = self._clock.now if time_s is None else time_s
        self._timer = self._clock.at(time_s, Phase.plan + self.index, self._on_plan)

    def _on_plan(self, event: Event) -> None:
        if event is not self._timer:
            return
        self._timer = None
        self._wakes = False
        self._plan(self._clock.now)

    def _plan(self, now: float) -> None:
        """Decide what comes next and set out, if there is anything to do."""
        core = self.core
        self._mirror_timer = None
        plan = core.plan(now)
        transfers = core.take_transfers()
        delay_s = self._begin(transfers) if transfers else 0.0
        if core.residents is not None:
            for load in core.take_adapter_loads():
                done_s = self._links.load(load, now)
                self._later(done_s, Phase.arrive, partial(self._on_adapter_loaded, load.name))
        if plan is None or transfers or self.events.is_news(core, plan):
            self.events.planned(core, plan, transfers, now)
        if self._incoming:
            self._find_incoming(plan)
        for seq in core.lost if plan is None else plan.preempted:
            self._last_tokens.preempted(seq)
        if plan is None:
            if self._signals is not None:
                self._signals.planned(None, self._num_entered, self._num_entered_tokens, now)
            if core.wake_s < inf:
                self._plan_soon(core.wake_s)
            return
        if self._on_plan_made is not None:
            self._on_plan_made(plan)
        for seq in plan.admitted:
            if isnan(self._requests.scheduled_s[seq.request_id]) or self._requests.lost_kv:
                self._requests.schedule(seq, now)
            if self._mirrors is not None:
                self._mirrors.admitted(seq.request_id)
            if seq.state is SequenceState.decoding and seq.request.branching is None:  # swapped in
                self._last_tokens.emit(seq, self._requests.last_token_s[seq.request_id])
        shape = shape_of(plan, 0) if plan.chunks else None
        num_iterations = 1 if delay_s else min(plan.horizon, self._max_leap)
        ends_s = self._ends_s(plan, shape, num_iterations, now + delay_s)
        if plan.until_s < ends_s[-1]:
            del ends_s[bisect_left(ends_s, plan.until_s) + 1 :]
        flight = Flight(
            plan,
            shape,
            now,
            ends_s,
            len(ends_s),
            len(core.running),
            core.num_waiting,
            core.pool.num_used,
            core.num_tokens_held,
        )
        self._flight = flight
        if now != self._busy_until_s:
            self._busy_s += self._busy_until_s - self._busy_from_s
            self._busy_from_s = now
        if self._signals is not None:
            self._signals.planned(flight, self._num_entered, self._num_entered_tokens, now)
        self._leave_after(flight, len(ends_s))
        if self._is_mirrored:
            self._expect_mirroring(flight)

    def _expect_mirroring(self, flight: Flight) -> None:
        """Wait for the next iteration of a flight after which KV is to be copied, if there is one."""
        assert self._mirrors is not None
        every, num_before = self._mirrors.every_tokens, self.core.num_iterations
        due = (max(num_before, self._num_mirrored) // every + 1) * every - num_before
        if due <= flight.num_iterations:
            mirror = partial(self._mirror, flight, due)
            self._mirror_timer = self._clock.at(flight.ends_s[due - 1], Phase.mirror + self.index, mirror)

    def _mirror(self, flight: Flight, num_iterations: int, event: Event) -> None:
        """So many iterations of a flight are over: copy what is new. In a leap the engine has not heard."""
        if event is not self._mirror_timer:
            return
        assert self._mirrors is not None
        num_ahead = num_iterations if self._flight is flight else 0
        self._num_mirrored = self.core.num_iterations + num_ahead
        self._mirrors.copy(self, self._computed_after(flight.plan, num_ahead))
        if num_ahead:
            self._expect_mirroring(flight)

    def _computed_after(self, plan: StepPlan, num_iterations: int) -> dict[int, int]:
        """Tokens of each sequence that have their KV here once a plan under way has been run so often."""
        computed = {
            seq.request_id: seq.num_computed
            for seq in self.core.running.values()
            if seq.state is not SequenceState.loading and seq.request.branching is None
        }
        if num_iterations:
            for seq in plan.decodes:
                computed[seq.request_id] += num_iterations
            for chunk in plan.chunks:
                computed[chunk.seq.request_id] += num_iterations * chunk.num_tokens
        return computed

    def _begin(self, transfers: list[Transfer]) -> float:
        """Start copies between tiers; returns for how long the step waits for those out of its blocks."""
        now, delay_s = self._clock.now, 0.0
        for transfer in transfers:
            if transfer.source == "remote":
                self._fetch(transfer)
                continue
            if transfer.source == "mirror":
                self._fetch_mirrored(transfer)
                continue
            done_s = self._links.begin(transfer, now)
            if transfer.seq is not None:
                self._later(done_s, Phase.arrive, partial(self._on_loaded, transfer.seq.request_id))
            elif not self._links.overlapped:
                delay_s = max(delay_s, done_s - now)
        return delay_s

    def _fetch(self, transfer: Transfer) -> None:
        """Let KV be copied that another replica holds."""
        assert self._handovers is not None
        assert transfer.seq is not None
        request_id = transfer.seq.request_id
        had_room_at_once = request_id in self._new_incoming
        self._handovers.fetch(request_id, transfer.num_tokens, had_room_at_once=had_room_at_once)

    def _fetch_mirrored(self, transfer: Transfer) -> None:
        """Let KV be copied that a replica had before it crashed, perhaps from this one's own host."""
        assert self._mirrors is not None
        assert transfer.seq is not None
        request_id = transfer.seq.request_id
        if not self._mirrors.fetch(request_id, transfer.num_tokens):
            done_s = self._links.begin(transfer._replace(source="host"), self._clock.now)
            self._later(done_s, Phase.arrive, partial(self.fetched, request_id))

    def _find_incoming(self, plan: StepPlan | None) -> None:
        """A plan was made: who was handed over and is run by it has found all its KV in the cache here."""
        assert self._handovers is not None
        self._new_incoming.clear()
        for seq in () if plan is None else plan.admitted:
            if seq.request_id in self._incoming:
                del self._incoming[seq.request_id]
                self._handovers.found(seq.request_id)

    def _hand_over(self, seq: Sequence, now: float) -> None:
        """A prompt is done: from here on it is for another replica."""
        assert self._handovers is not None
        migrant = self.core.hand_over(seq.request_id)
        assert migrant is not None, f"{seq!r} cannot be handed over"
        if seq.num_output_tokens == 1:
            self.num_queued_tokens -= seq.num_prompt_tokens
        self._resumed.discard(seq.request_id)
        self.events.hand_over(seq, now)
        self._handovers.begin(self, migrant, self._prefill_s.pop(seq.request_id, 0.0), now)

    def _depart(self, request_id: int) -> None:
        """Free what a sequence that was handed over holds here."""
        seq = self.core.abort(request_id, FinishReason.migrated)
        if seq is not None:
            self._leave(seq)
            assert self._handovers is not None
            self._handovers.departed(self, seq)

    def _time_prefills(self, flight: Flight) -> None:
        """Share the time of a flight's iterations out among its prompts."""
        start_s = flight.start_s
        num_tokens = sum(chunk.num_tokens for chunk in flight.plan.chunks)
        for end_s in flight.ends_s[: flight.num_iterations]:
            for chunk in flight.plan.chunks:
                request_id, share = chunk.seq.request_id, chunk.num_tokens / num_tokens
                self._prefill_s[request_id] = self._prefill_s.get(request_id, 0.0) + share * (end_s - start_s)
            start_s = end_s

    def _on_loaded(self, request_id: int) -> None:
        self._settle()
        seq = self.core.loading.get(request_id)
        if seq is not None:
            self.events.loaded(seq, self._clock.now)
        self.core.loaded(request_id)
        self._look_up()

    def _on_adapter_loaded(self, name: str) -> None:
        self._settle()
        assert self.core.residents is not None
        for seq in self.core.residents.waiters(name):
            self.events.loaded(seq, self._clock.now)
        self.core.adapter_loaded(name)
        self._look_up()

    def _ends_s(
        self, plan: StepPlan, shape: IterationShape | None, num_iterations: int, start_s: float
    ) -> list[float]:
        """When each of the plan's iterations ends: added up one after the other, as stepping does.

        Up to the first that the model cannot price, if there is one: the leap may be cut before it.
        """
        if shape is None and plan.num_widening == plan.num_decodes and plan.adapters is None:
            durations_s = self._model.decode_seconds(
                plan.num_decodes, plan.num_decode_context_tokens, num_iterations
            )
        elif num_iterations == 1:
            return [start_s + self._slowdown * float(self._model.seconds(shape or shape_of(plan, 0)))]
        else:
            seconds = np.asarray(self._model.seconds(shape_of(plan, np.arange(num_iterations))))
            durations_s = np.broadcast_to(seconds, num_iterations).tolist()
        if self._slowdown != 1:
            durations_s = [self._slowdown * duration_s for duration_s in durations_s]
        durations_s[0] += start_s
        ends_s = list(accumulate(durations_s))
        if isnan(ends_s[-1]):
            ends_s = list(takewhile(lambda end_s: not isnan(end_s), ends_s))
            if not ends_s:  # asked alone, the model says what it lacks
                self._model.seconds(shape_of(plan, 0))
        return ends_s

    def _commit(self, flight: Flight) -> None:
        """Enter a flight's iterations into the logs and the core."""
        core, plan, num_iterations = self.core, flight.plan, flight.num_iterations
        end_s = flight.ends_s[num_iterations - 1]
        if num_iterations > 1 and self._signals is not None:
            self._signals.refresh(end_s)
        times = self._last_tokens
        num_apart = times.log_gaps(plan, flight.ends_s[0], self.iterations)
        outcome = StepOutcome(num_iterations)
        if core.may_branch:
            num_apart += plan.num_branches
            outcome = outcome._replace(parents=times.advance_branches(plan, end_s, self.iterations))
        self.iterations.add(flight, core, times.together_s, num_apart)
        self._busy_until_s = end_s
        if plan.num_decodes > plan.num_branches:
            times.together_s = end_s
        progress = core.commit(plan, outcome, end_s)
        requests = self._requests
        if self._hands_over and plan.chunks:
            self._time_prefills(flight)
        for chunk in plan.chunks:
            requests.prefill_iterations[chunk.seq.request_id] += num_iterations
        for seq in progress.prefilled:
            if self._hands_over and seq.state is SequenceState.decoding:
                self._hand_over(seq, end_s)
                continue
            if seq.num_output_tokens == 1:
                requests.first_token_s[seq.request_id] = end_s
                self.num_queued_tokens -= seq.num_prompt_tokens
                if self._on_first_token is not None:
                    self._on_first_token(seq)
            else:  # resumed after a preemption: the gap spans its absence
                num_new = seq.num_emitted_tokens - requests.output_tokens[seq.request_id]
                for _ in range(num_new):
                    self.iterations.add_gap(seq.request_id, requests.last_token_s[seq.request_id], end_s)
                self.events.prefilled(seq, end_s)
                if seq.request_id in self._resumed:
                    self._resumed.remove(seq.request_id)
                    if self._on_first_token is not None:
                        self._on_first_token(seq)
            times.emit(seq, end_s)
        for seq in progress.finished:
            times.forget(seq)
            self._resumed.discard(seq.request_id)
            self._prefill_s.pop(seq.request_id, None)
            requests.end(seq, Status.finished, end_s, end_s)
            self._end(seq)

    def _abort(self, request_id: int) -> None:
        """Give up a request that is still here."""
        seq = self.core.find(request_id)
        if seq is None:
            return
        last_token_s = self._last_tokens.last_s(seq)
        then = self._drops.pop(request_id, None)
        self.events.leave(seq, self._clock.now, is_lost=then is not None)
        self._last_tokens.forget(seq)
        self._resumed.discard(request_id)
        self._prefill_s.pop(request_id, None)
        is_unseen = isnan(self._requests.first_token_s[request_id])
        if is_unseen and seq.state is not SequenceState.leaving and request_id not in self._incoming:
            self.num_queued_tokens -= seq.num_prompt_tokens
        self._incoming.pop(request_id, None)
        self._new_incoming.discard(request_id)
        self.core.abort(request_id)
        if then is not None:
            self._leave(seq)
            self._clock.at(self._clock.now, Phase.arrive, lambda event: then())
            return
        self._requests.end(seq, Status.aborted, last_token_s, self._clock.now)
        self._end(seq)

    def _end(self, seq: Sequence) -> None:
        """A request has ended here."""
        self._leave(seq)
        self._on_end(seq)

    def _leave(self, seq: Sequence) -> None:
        """A request is outstanding no more."""
        self.num_outstanding -= 1
        self.num_outstanding_tokens -= seq.num_prompt_tokens
