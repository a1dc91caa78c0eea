"""One engine in simulated time: plan, wait as long as the hardware model says, commit.

The main loop is `_on_boundary`: `_finish_step` commits what has run, `_begin_step` plans and prices what runs
next, and sets the timer for its end. A plan that holds for several iterations is run as one event (a leap).
What comes from outside in the middle of a leap cuts it (`look_up`): the leap then ends at the first iteration
boundary that is not earlier, exactly where a simulation of single iterations would have seen it.

Everything else joins by `attach`: see `sim.engine.attachment`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf, isnan

from simpy import Event

from policies.core.limits import StopAfter
from policies.core.plan import Migrant, StepOutcome, StepPlan
from policies.core.request import Request
from policies.core.sequence import FinishReason, Sequence, SequenceState
from sim.engine.attachment import EVENTS, Attachment, overridden
from sim.engine.clock import Clock, Phase
from sim.engine.copies import Copies
from sim.engine.intake import Intake
from sim.engine.last_tokens import LastTokens
from sim.engine.pool import Pool
from sim.engine.prices import ends_s
from sim.engine.readings import NO_SIGNALS, Readings
from sim.engine.running_step import RunningStep
from sim.engine.shape import shape_of
from sim.records.events import EventLog
from sim.records.iterations import IterationLog
from sim.records.requests import RequestLog, Status
from sim.records.run import EngineRecord

MAX_LEAP = 1024  # iterations priced at once: a leap that is cut has wasted the rest


def _attach_nothing(replica: Replica) -> None:
    """A replica without attachments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Surroundings:
    """What the replicas of a run share.

    on_end is called with every sequence that ends. attach is called with every new replica, for what joins
    it. leap=False runs iteration by iteration. seed: of the world's choices. are_looked_into: a routing
    policy asks for `num_cached`.
    """

    clock: Clock
    requests: RequestLog
    on_end: Callable[[Sequence], None]
    attach: Callable[[Replica], None] = _attach_nothing
    leap: bool = True
    seed: int = 0
    are_looked_into: bool = False


class Replica:
    """Drives an EngineCore on the clock and writes down what happens. It is a `policies.routing.ReplicaView`.

    A crash loses the engine and all that it was doing, and puts an empty one in its place.
    """

    signals: Readings = NO_SIGNALS
    """What the engine says of itself; attached where a policy reads it."""

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
        self.copies = Copies(pool.links(), self._load_later)
        self.intake = Intake(pool.plans_ahead)
        self._clock = around.clock
        self._requests = around.requests
        self._on_end = around.on_end
        self._max_leap = MAX_LEAP if around.leap else 1
        self._is_looked_into = around.are_looked_into
        self._slowdown = 1.0
        self._step: RunningStep | None = None
        self._timer: Event | None = None  # the one event that counts; a cut leaves its predecessor void
        self._wake_s = inf  # when an idle replica plans again
        self._is_idle = True  # the last plan found nothing to compute; the timer, if any, only wakes it
        self._life = 0  # how often it has crashed: what was to happen in an earlier life does not
        self._queued: dict[int, int] = {}  # by request id: prompt tokens of those without a token from here
        self._aborts: dict[int, Callable[[], None] | None] = {}  # at the next boundary, and what follows
        self._departures: dict[int, Callable[[Sequence], None]] = {}  # the same of those that go on elsewhere
        self._last_tokens = LastTokens(self.core, self._requests, around.seed)
        self._listeners: dict[str, tuple[Callable[..., object], ...]] = dict.fromkeys(EVENTS, ())
        self._name_listeners()
        around.attach(self)

    def attach(self, attachment: Attachment) -> None:
        """Let an attachment know what happens here, behind those that were attached before."""
        for event in overridden(attachment):
            self._listeners[event] += (getattr(attachment, event),)
        self._name_listeners()

    def _name_listeners(self) -> None:
        """Attributes are quicker to look up than keys, and most of them are empty."""
        listeners = self._listeners
        self._on_sent, self._on_entered = listeners["sent"], listeners["entered"]
        self._on_planned, self._on_started = listeners["planned"], listeners["started"]
        self._on_ending, self._hand_over = listeners["ending"], listeners["hands_over"]
        self._on_prefilled, self._on_left = listeners["prefilled"], listeners["left"]
        self._on_crashed = listeners["crashed"]

    # What routers read; see `ReplicaView`.

    @property
    def num_running(self) -> int:
        """Sequences with a slot, as far as the signals tell."""
        return self.signals.num_running

    @property
    def num_waiting(self) -> int:
        """Sequences in the queue, as far as the signals tell."""
        return self.signals.num_waiting

    @property
    def num_free_kv_tokens(self) -> int:
        """Tokens for which KV memory is free, as far as the signals tell."""
        return self.num_kv_tokens - self.signals.num_blocks_used * self.core.pool.block_size

    @property
    def num_unseen(self) -> int:
        """Requests sent here that the signals do not count yet."""
        return self.signals.num_unseen

    @property
    def num_unseen_tokens(self) -> int:
        """Prompt tokens of those."""
        return self.signals.num_unseen_tokens

    def num_cached(self, request: Request) -> int:
        """Tokens of a prompt that the cache has, as of the last iteration that has begun.

        Raises RuntimeError unless the run's surroundings say that replicas are looked into.
        """
        if not self._is_looked_into:
            raise RuntimeError(
                "num_cached: the routing policy must declare reads_caches: ClassVar[bool] = True"
            )
        self.settle()
        return self.core.pool.peek(request)

    def has_adapter(self, name: str) -> bool:
        """Whether an adapter is on its GPU, or on its way there."""
        return self.core.residents is not None and self.core.residents.is_resident(name)

    # What comes from outside.

    def submit(self, request: Request, stop_after: StopAfter) -> None:
        """Take in a request that ends, each branch of it, after stop_after tokens. Raises RejectedError."""
        bounds = self.core.bounds_of(request, stop_after)
        self._accept(request, partial(self.core.add, request, stop_after, bounds))

    def resume(self, migrant: Migrant, stop_after: StopAfter) -> None:
        """Take in a request that goes on where a replica that crashed had got.

        `EngineCore.check_migrant` allows it. What it has computed is in another host's memory.
        """
        self._accept(migrant.request, partial(self.core.adopt, migrant, stop_after, "mirror"))

    def adopt(self, migrant: Migrant, stop_after: StopAfter) -> None:
        """Take in a sequence that another replica has handed over. Raises RejectedError."""
        self.core.check_migrant(migrant.request, migrant.num_known, stop_after)
        now = self._clock.now
        self._expect(migrant.request, now, partial(self.core.adopt, migrant, stop_after), now)

    def abort(self, request_id: int, then: Callable[[], None] | None = None) -> None:
        """Give a request up: now if no iteration is under way, else at the next iteration boundary.

        then: called instead of on_end. A request that is being given up already stays with what follows.
        """
        if self._step is None and request_id not in self.intake:
            self._abort(request_id, then)
            if self.core.num_waiting:  # perhaps for what it held
                self.look_up()
        elif request_id not in self._aborts:
            if request_id not in self.intake:  # else it is given up as soon as the engine knows it
                self.settle()
                self.look_up()
            self._aborts[request_id] = then

    def drop(self, request_id: int, then: Callable[[], None]) -> None:
        """Let a sequence go that waits here for KV that will not come; then do something else about it."""
        if request_id not in self._aborts:  # else its client has given it up already
            self.abort(request_id, then)

    def depart(self, request_id: int, then: Callable[[Sequence], None]) -> None:
        """Let a sequence go whose KV is in another replica now; when, as for `abort`."""
        if self._step is None:
            self._depart(request_id, then)
        else:
            self.settle()
            self._departures[request_id] = then
        self.look_up()

    def loaded(self, request_id: int) -> None:
        """KV that a sequence waits for is here."""
        self.settle()
        seq = self.core.loading.get(request_id)
        if seq is not None:
            self.events.loaded(seq, self._clock.now)
        self.core.loaded(request_id)
        self.look_up()

    def adapter_loaded(self, name: str) -> None:
        """An adapter that sequences wait for is here."""
        self.settle()
        assert self.core.residents is not None
        for seq in self.core.residents.waiters(name):
            self.events.loaded(seq, self._clock.now)
        self.core.adapter_loaded(name)
        self.look_up()

    def slow_down(self, factor: float) -> None:
        """Let iterations take `factor` times as long, from the next on that begins; 1: as they should."""
        if factor != self._slowdown:
            self.settle()
            self._slowdown = factor
            self.look_up()

    def slow_links(self, factor: float) -> None:
        """Let copies between memory tiers that begin from now on take `factor` times as long."""
        self.copies.links.slowdown = factor

    def later(self, time_s: float, phase: int, action: Callable[[], None]) -> None:
        """Do something then, unless the engine crashes before."""
        life = self._life

        def act(event: Event) -> None:
            if self._life == life:
                action()

        self._clock.at(time_s, phase, act)

    # The main loop.

    def _on_boundary(self, event: Event) -> None:
        """A step has run: commit it, let go what was to go at its end, and plan the next."""
        if event is not self._timer:
            return
        self._finish_step()
        if self._aborts or self._departures:
            self._let_go()
        if self._clock.peek() > self._clock.now:
            self._begin_step(self._clock.now)
        else:  # others act at this very instant: plan after them
            self._plan_at(self._clock.now)

    def _on_plan(self, event: Event) -> None:
        """The time has come for a plan without a step before it."""
        if event is self._timer:
            self._begin_step(self._clock.now)

    def _finish_step(self) -> None:
        """Commit the running step, as far as it says that it has run."""
        step = self._step
        assert step is not None
        self._step = self._timer = None
        for tell in self._on_ending:
            tell(step, self._clock.now)
        outcome = self._log(step)
        intake = self.intake
        if intake.plans_ahead:
            while intake.next_s <= step.last_start_s:
                self._enter()
        else:
            while intake.next_s < step.end_s:
                self._enter()
        self._commit(step, outcome)

    def _begin_step(self, now: float) -> None:
        """Decide what runs next and set out, if there is anything to compute."""
        core, intake = self.core, self.intake
        self._timer = None
        if intake.next_s <= now and (self._is_idle or not intake.plans_ahead):
            self._enter()
            while intake.next_s <= now and not intake.plans_ahead:
                self._enter()
            if self._aborts:
                self._let_go()
        plan = core.plan(now)
        transfers = core.take_transfers()
        delay_s = self.copies.begin(transfers, now) if transfers else 0.0
        for tell in self._on_planned:
            tell(plan, now)
        if plan is None or transfers or self.events.is_news(core, plan):
            self.events.planned(core, plan, transfers, now)
        for seq in core.lost if plan is None else plan.preempted:
            self._last_tokens.preempted(seq)
        self._is_idle = plan is None
        if plan is None:
            self._wake_s = max(now, min(core.wake_s, intake.next_s))
            if self._wake_s < inf:
                self._plan_at(self._wake_s)
        else:
            self._run(plan, now, delay_s)
        for tell in self._on_started:
            tell(self._step, now)

    def _run(self, plan: StepPlan, now: float, delay_s: float) -> None:
        """Set out with a plan: when its iterations end, and at which of these ends the next plan is due."""
        for seq in plan.admitted:
            self._schedule(seq, now)
        shape = shape_of(plan, 0) if plan.chunks else None
        num_iterations = 1 if delay_s or self.intake.next_s <= now else min(plan.horizon, self._max_leap)
        ends = ends_s(self.pool.model, plan, shape, num_iterations, now + delay_s, self._slowdown)
        if plan.until_s < ends[-1]:
            del ends[bisect_left(ends, plan.until_s) + 1 :]
        step = self._step = RunningStep(plan, shape, now, ends, len(ends))
        if self.intake.next_s < ends[-1]:
            step.num_iterations = min(step.num_iterations, self.intake.last_iteration(step))
        self._timer = self._clock.at(step.end_s, self.index, self._on_boundary)

    def look_up(self) -> None:
        """Something came from outside: plan anew at the first iteration boundary that is not in the past."""
        step = self._step
        if step is None:
            if self._timer is None or self._is_idle:
                self._plan_at(self._clock.now)
        elif step.num_iterations > 1:
            self._cut(step, bisect_left(step.ends_s, self._clock.now) + 1)

    def settle(self) -> None:
        """Cut a leap behind the iterations that have ended, if they have changed what the cache holds.

        For what looks into the cache in the middle of a leap. The cut must come before anything else comes
        from outside: the plan made there must not know of it.
        """
        step = self._step
        if not self._is_looked_into or step is None or step.num_iterations == 1:
            return
        core = self.core
        num_ended = min(bisect_left(step.ends_s, self._clock.now), step.num_iterations - 1)
        if not num_ended:
            return
        if not step.plan.chunks and core.blocks_of_repeats(step.plan, num_ended) <= core.pool.num_blank:
            return  # nothing was evicted
        step.num_iterations = num_ended
        self._finish_step()
        self._begin_step(step.end_s)

    def _cut(self, step: RunningStep, num_iterations: int) -> None:
        """Let a leap end earlier, if it does not anyway."""
        if num_iterations < step.num_iterations:
            step.num_iterations = num_iterations
            self._timer = self._clock.at(step.end_s, self.index, self._on_boundary)

    def _plan_at(self, time_s: float) -> None:
        """Plan then, after all else that happens at that instant."""
        self._wake_s = time_s
        self._timer = self._clock.at(time_s, Phase.plan + self.index, self._on_plan)

    # Requests on their way to the engine.

    def _accept(self, request: Request, enter: Callable[[], Sequence]) -> None:
        """Count a request from the gateway, and expect it."""
        request_id, known_s = request.request_id, self._clock.now + self.pool.frontend_s
        if isnan(self._requests.first_token_s[request_id]):
            self._queued[request_id] = request.prompt.num_tokens
            self.num_queued_tokens += request.prompt.num_tokens
        if request_id in self._departures:  # its last attempt has not left: it comes back behind it
            assert self._step is not None
            known_s = self._step.boundary_s(self._clock.now)
        self._expect(request, known_s, enter)

    def _expect(
        self, request: Request, known_s: float, enter: Callable[[], Sequence], sent_s: float | None = None
    ) -> None:
        """Let a request reach the engine at known_s."""
        self.num_outstanding += 1
        self.num_outstanding_tokens += request.prompt.num_tokens
        for tell in self._on_sent:
            tell(request)
        intake, step = self.intake, self._step
        is_next = known_s < intake.next_s
        intake.add(known_s, request, enter, sent_s)
        if not is_next:
            return
        if step is not None:
            self._cut(step, intake.last_iteration(step))
        elif self._is_idle and known_s < self._wake_s:
            self._plan_at(known_s)

    def _enter(self) -> None:
        """Give the first pending request to the engine."""
        entry = self.intake.take()
        seq = entry.enter()
        self.events.enter(seq, entry.sent_s)
        for tell in self._on_entered:
            tell(seq)

    # What a step has done, and who goes.

    def _schedule(self, seq: Sequence, now: float) -> None:
        """Work on a request begins, perhaps for the first time."""
        requests, request_id = self._requests, seq.request_id
        if isnan(requests.scheduled_s[request_id]) or requests.lost_kv:
            requests.schedule(seq, now)
        if seq.state is SequenceState.decoding and seq.request.branching is None:  # swapped in
            self._last_tokens.emit(seq, requests.last_token_s[request_id])

    def _log(self, step: RunningStep) -> StepOutcome:
        """Enter a step's iterations into the log, before the core advances."""
        plan, times = step.plan, self._last_tokens
        num_apart = times.log_gaps(plan, step.ends_s[0], self.iterations)
        outcome = StepOutcome(step.num_iterations)
        if self.core.may_branch:
            num_apart += plan.num_branches
            outcome = outcome._replace(parents=times.advance_branches(plan, step.end_s, self.iterations))
        self.iterations.add(step, self.core, times.together_s, num_apart)
        if plan.num_decodes > plan.num_branches:
            times.together_s = step.end_s
        return outcome

    def _commit(self, step: RunningStep, outcome: StepOutcome) -> None:
        """Advance the core, and enter the tokens of prompts and the ends into the requests' records."""
        plan, end_s, requests = step.plan, step.end_s, self._requests
        progress = self.core.commit(plan, outcome, end_s)
        for chunk in plan.chunks:
            requests.prefill_iterations[chunk.seq.request_id] += step.num_iterations
        for seq in progress.prefilled:
            self.num_queued_tokens -= self._queued.pop(seq.request_id, 0)
            for hand_over in self._hand_over:
                if hand_over(seq, end_s):
                    break
            else:
                self._note_token(seq, end_s)
        for seq in progress.finished:
            requests.end(seq, Status.finished, end_s, end_s)
            self._leave(seq)
            self._on_end(seq)

    def _note_token(self, seq: Sequence, now: float) -> None:
        """A prefill has produced a token."""
        requests, request_id = self._requests, seq.request_id
        if seq.num_output_tokens == 1:
            requests.first_token_s[request_id] = now
        else:  # resumed after a preemption: the gap spans its absence
            num_new = seq.num_emitted_tokens - requests.output_tokens[request_id]
            for _ in range(num_new):
                self.iterations.add_gap(request_id, requests.last_token_s[request_id], now)
            self.events.prefilled(seq, now)
        for tell in self._on_prefilled:
            tell(seq, now)
        self._last_tokens.emit(seq, now)

    def _let_go(self) -> None:
        """Give up what was to be given up at the end of the step, then what goes on elsewhere."""
        aborts, self._aborts = self._aborts, {}
        for request_id, then in aborts.items():
            if request_id in self.intake:
                self._aborts[request_id] = then
            else:
                self._abort(request_id, then)
        departures, self._departures = self._departures, {}
        for request_id, then_tell in departures.items():
            self._depart(request_id, then_tell)

    def _abort(self, request_id: int, then: Callable[[], None] | None) -> None:
        """Give up a request, if it is still here."""
        seq, now = self.core.find(request_id), self._clock.now
        if seq is None:
            return
        last_token_s = self._last_tokens.last_s(seq)
        self.events.leave(seq, now, is_lost=then is not None)
        self.core.abort(request_id)
        self._leave(seq)
        if then is None:
            self._requests.end(seq, Status.aborted, last_token_s, now)
            self._on_end(seq)
        else:
            self.later(now, Phase.arrive, then)

    def _depart(self, request_id: int, then: Callable[[Sequence], None]) -> None:
        """Free what a sequence holds that goes on elsewhere, if it is still here."""
        seq = self.core.abort(request_id, FinishReason.migrated)
        if seq is not None:
            self._leave(seq)
            then(seq)

    def _leave(self, seq: Sequence) -> None:
        """A request is outstanding no more."""
        num_tokens = seq.num_prompt_tokens
        self.num_outstanding -= 1
        self.num_outstanding_tokens -= num_tokens
        self.num_queued_tokens -= self._queued.pop(seq.request_id, 0)
        self._last_tokens.forget(seq)
        for tell in self._on_left:
            tell(seq)

    def _load_later(self, request_id: int, done_s: float) -> None:
        """A copy over the replica's own links will be done."""
        self.later(done_s, Phase.arrive, partial(self.loaded, request_id))

    # The end of the run, and of an engine.

    def stop(self, now: float) -> None:
        """End the simulation: enter the iterations that have ended by now, and how far the rest has come."""
        self._finish_until(now)
        for seq in self.core.unfinished:
            if self._requests.replica[seq.request_id] == self.index:  # else it is going on elsewhere
                self._requests.note(seq, self._last_tokens.last_s(seq))
            self.events.leave(seq, now)
        for entry in self.intake.entries():
            self.events.never_met(entry.request, now, sent_s=entry.sent_s)

    def crash(self) -> list[int]:
        """Lose the engine at this instant; returns the requests that it had taken in, by id.

        What its iterations up to now have produced was sent to the clients.
        """
        now = self._clock.now
        self._finish_until(now)
        lost = [seq for seq in self.core.unfinished if seq.request_id not in self._departures]
        pending = self.intake.entries()
        for seq in lost:
            self._requests.note(seq, self._last_tokens.last_s(seq))
            if seq.state is not SequenceState.loading:
                self._requests.lose_kv(seq.request_id, seq.num_computed)
            self.events.leave(seq, now, is_lost=True)
        for entry in pending:
            self.events.never_met(entry.request, now, is_lost=True, sent_s=entry.sent_s)
        self._begin_anew(now)
        return sorted([*(seq.request_id for seq in lost), *(entry.request.request_id for entry in pending)])

    def _begin_anew(self, now: float) -> None:
        """Put an empty engine in the place of the one that crashed."""
        self._life += 1
        self._step = self._timer = None
        self._is_idle, self._wake_s = True, inf
        self.intake.clear()
        self._aborts.clear()
        self._departures.clear()
        self._queued.clear()
        self.num_outstanding = self.num_outstanding_tokens = self.num_queued_tokens = 0
        num_iterations = self.core.num_iterations
        self.lost_engines.append(EngineRecord.of(self.core, now))
        self.core = self.pool.core()
        self.core.num_iterations = self.core.pool.num_iterations = num_iterations
        self.events = EventLog(self.pool.frontend_s, after=self.events)
        self._last_tokens.begin_anew(self.core)
        self.copies.links = self.pool.links()
        for tell in self._on_crashed:
            tell(now)

    def _finish_until(self, now: float) -> None:
        """Commit those iterations of the running step that have ended."""
        step = self._step
        if step is not None:
            step.num_iterations = bisect_right(step.ends_s, now)
            if step.num_iterations:
                self._finish_step()

    def take_iterations(self) -> IterationLog:
        """The log of its iterations; it is given up, as all of them are large."""
        log = self.iterations
        self.iterations = IterationLog(self.index, log.block_size, log.serves_adapters)
        return log
