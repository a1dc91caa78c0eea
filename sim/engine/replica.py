"""One engine in simulated time: plan, wait as long as the hardware model says, commit.

The main loop is `_on_boundary`: `_finish_step` commits what has run, `_begin_step` plans and prices what runs
next, and sets the timer for its end. A plan that holds for several iterations is run as one event (a leap).
What comes from outside in the middle of a leap cuts it (`look_up`): the leap then ends at the first iteration
boundary that is not earlier, exactly where a simulation of single iterations would have seen it.

What happens is written down by `Recorder`. Everything else joins by `attach`: see `sim.engine.attachment`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

from policies.core.limits import StopAfter
from policies.core.plan import StepPlan
from policies.core.request import Request
from policies.core.sequence import FinishReason, Sequence
from sim.engine.attachment import Attachment, Listeners
from sim.engine.clock import Phase
from sim.engine.copies import Copies
from sim.engine.intake import Enter, Intake, Pending
from sim.engine.iteration_times import ends_s
from sim.engine.load_counts import LoadCounts
from sim.engine.recorder import Recorder
from sim.engine.replica_pool import ReplicaPool
from sim.engine.run_context import RunContext
from sim.engine.running_step import RunningStep
from sim.engine.shape import shape_of
from sim.records.requests import Status

MAX_LEAP = 1024  # iterations priced at once: a leap that is cut has wasted the rest


class Replica(LoadCounts):
    """Drives an EngineCore on the clock. It is a `policies.routing.ReplicaView`.

    A crash loses the engine and all that it was doing, and puts an empty one in its place.
    """

    def __init__(self, index: int, pool: ReplicaPool, context: RunContext) -> None:
        self.index = index
        self.pool = pool
        self.price_usd_per_hour = pool.price_usd_per_hour
        self.core = core = pool.core()
        self._take_transfers = core.transfers.take
        LoadCounts.__init__(self, core.block_pool.block_size, core.block_pool.num_blocks)
        self.recorder = Recorder(index, core, context.requests, pool.frontend_s, context.seed)
        self.copies = Copies(pool.links(), self._load)
        self.intake = Intake(pool.plans_ahead, self._enter)
        self._clock = context.clock
        self._on_end = context.on_end
        self._max_leap = MAX_LEAP if context.leap else 1
        self._plan_phase = Phase.plan + index
        self._slowdown = 1.0
        self.step: RunningStep | None = None
        """What it runs now."""
        self._timer: int | None = None  # the one event that counts; a cut leaves its predecessor void
        self._wake_s = inf  # when an idle replica plans again
        self._is_idle = True  # the last plan found nothing to compute; the timer, if any, only wakes it
        self._num_crashes = 0  # `later` drops what was scheduled before a crash
        self._aborts: dict[int, Callable[[], None] | None] = {}  # at the next boundary, and what follows
        self._departures: dict[int, Callable[[Sequence], None]] = {}  # the same of those that go on elsewhere
        self._listeners = Listeners()

    def attach(self, attachment: Attachment) -> None:
        """Attach a listener to the events of the replica; it is called after those attached before."""
        self._listeners.add(attachment)

    # The main loop.

    def _on_boundary(self, event: int) -> None:
        """A step has run: commit it, let go what was to go at its end, and plan the next."""
        if event != self._timer:
            return
        self._finish_step()
        if self._aborts or self._departures:
            self._let_go()
        if self._clock.is_quiet():
            self._begin_step(self._clock.now)
        else:  # others act at this very instant: plan after them
            self._plan_at(self._clock.now)

    def _on_plan(self, event: int) -> None:
        """The time has come for a plan without a step before it."""
        if event == self._timer:
            self._begin_step(self._clock.now)

    def _finish_step(self) -> None:
        """Commit the running step, as far as it says that it has run."""
        step = self.step
        assert step is not None
        self.step = self._timer = None
        for notify in self._listeners.ending:
            notify(step, self._clock.now)
        outcome = self.recorder.ran(step)
        intake, end_s = self.intake, step.end_s
        if intake.next_s < end_s:
            intake.enter_during(step)
        prefilled, finished = self.core.commit(step.plan, outcome, end_s)
        for seq in prefilled:
            self._prefilled(seq, end_s)
        for seq in finished:
            self.recorder.finished(seq, end_s)
            self._leave(seq)
            self._on_end(seq)

    def _begin_step(self, now: float) -> None:
        """Decide what runs next and set out, if there is anything to compute."""
        core, intake = self.core, self.intake
        self._timer = None
        if intake.next_s <= now:
            intake.enter_at(now, self._is_idle)
            if self._aborts:
                self._let_go()
        plan = core.plan(now)
        transfers = self._take_transfers()
        delay_s = self.copies.begin(transfers, now) if transfers else 0.0
        for notify in self._listeners.planned:
            notify(plan, now)
        self.recorder.planned(plan, transfers, now)
        if plan is None:
            self._rest(now)
        else:
            self._run(plan, now, delay_s)
        for notify_started in self._listeners.started:
            notify_started(self.step, now)

    def _run(self, plan: StepPlan, now: float, delay_s: float) -> None:
        """Set out with a plan: when its iterations end, and at which of these ends the next plan is due."""
        next_s = self.intake.next_s
        shape = shape_of(plan, 0) if plan.chunks else None
        num_iterations = 1 if delay_s or next_s <= now else min(plan.horizon, self._max_leap)
        ends = ends_s(self.pool.model, plan, shape, num_iterations, now + delay_s, self._slowdown)
        if plan.until_s < ends[-1]:
            del ends[bisect_left(ends, plan.until_s) + 1 :]
        step = self.step = RunningStep(plan, shape, now, ends)
        if next_s < step.end_s:
            num_iterations = self.intake.num_iterations_before(step)
            if num_iterations < step.num_iterations:
                step.cut(num_iterations)
        self._is_idle = False
        self._timer = self._clock.at(step.end_s, self.index, self._on_boundary)

    def _rest(self, now: float) -> None:
        """Nothing is to be computed: wake up when the policies want to be asked again, or a request comes."""
        self._is_idle = True
        self._wake_s = max(now, min(self.core.wake_s, self.intake.next_s))
        if self._wake_s < inf:
            self._plan_at(self._wake_s)

    def _plan_at(self, time_s: float) -> None:
        """Plan then, after all else that happens at that instant."""
        self._wake_s = time_s
        self._timer = self._clock.at(time_s, self._plan_phase, self._on_plan)

    def _cut(self, step: RunningStep, num_iterations: int) -> None:
        """Let a leap end earlier, if it does not anyway."""
        if num_iterations < step.num_iterations:
            step.cut(num_iterations)
            self._timer = self._clock.at(step.end_s, self.index, self._on_boundary)

    def look_up(self) -> None:
        """Something came from outside: plan anew at the first iteration boundary that is not in the past."""
        step = self.step
        if step is None:
            if self._timer is None or self._is_idle:
                self._plan_at(self._clock.now)
        elif step.num_iterations > 1:
            self._cut(step, bisect_left(step.ends_s, self._clock.now) + 1)

    def split(self, num_iterations: int) -> None:
        """Commit so many iterations of a leap, which have ended, and plan anew behind them."""
        step = self.step
        assert step is not None
        step.cut(num_iterations)
        self._finish_step()
        self._begin_step(step.end_s)

    def intervene(self) -> None:
        """Something is about to come from outside: let those know that have to act before."""
        for notify in self._listeners.intervening:
            notify()

    def later(self, time_s: float, phase: int, action: Callable[[], None]) -> None:
        """Do something then, unless the engine crashes before."""
        num_crashes = self._num_crashes

        def act(event: int) -> None:
            if self._num_crashes == num_crashes:
                action()

        self._clock.at(time_s, phase, act)

    # Requests come ...

    def submit(self, request: Request, stop_after: StopAfter) -> None:
        """Take in a request that ends, each branch of it, after stop_after tokens. Raises RejectedError."""
        core = self.core
        seq = core.sequence_of(request, stop_after)
        self.count_queued(request.request_id, request.prompt.num_tokens)
        self.expect(request, self.known_s(request), core.enter, seq)

    def known_s(self, request: Request) -> float:
        """When the frontend will have passed a request on that comes from the gateway now."""
        if request.request_id in self._departures:  # its last attempt has not left: it comes back behind it
            assert self.step is not None
            return self.step.boundary_s(self._clock.now)
        return self._clock.now + self.pool.frontend_s

    def expect(
        self, request: Request, known_s: float, enter: Enter, what: Any, sent_s: float | None = None
    ) -> None:
        """Let a request reach the engine at known_s, by enter(what); sent_s: see `Pending`."""
        self.num_outstanding += 1
        self.num_outstanding_tokens += request.prompt.num_tokens
        for notify in self._listeners.sent:
            notify(request)
        intake, step = self.intake, self.step
        is_next = known_s < intake.next_s
        intake.add(known_s, request, enter, what, sent_s)
        if not is_next:
            return
        if step is not None:
            if known_s < step.end_s:
                self._cut(step, intake.num_iterations_before(step))
        elif self._is_idle and known_s < self._wake_s:
            self._plan_at(known_s)

    def _enter(self, entry: Pending) -> None:
        """Give a pending request to the engine."""
        seq = entry.enter(entry.what)
        self.recorder.events.enter(seq, entry.sent_s)
        for notify in self._listeners.entered:
            notify(seq)

    def _load(self, request_id: int, done_s: float) -> None:
        """KV that a sequence waits for will be here."""
        self.later(done_s, Phase.arrive, partial(self.loaded, request_id))

    def loaded(self, request_id: int) -> None:
        """KV that a sequence waits for is here."""
        self.intervene()
        seq = self.core.loading.get(request_id)
        if seq is not None:
            self.recorder.events.loaded(seq, self._clock.now)
        self.core.loaded(request_id)
        self.look_up()

    # ... and go.

    def _prefilled(self, seq: Sequence, now: float) -> None:
        """A prefill has produced a token: the sequence goes on here, unless another replica decodes it."""
        if self._queued:
            self.num_queued_tokens -= self._queued.pop(seq.request_id, 0)
        for transfers_on in self._listeners.transfers_prefilled:
            if transfers_on(seq, now):
                return
        self.recorder.prefilled(seq, now)
        for notify in self._listeners.prefilled:
            notify(seq, now)

    def abort(self, request_id: int, then: Callable[[], None] | None = None) -> None:
        """Give a request up: now if no iteration is under way, else at the next iteration boundary.

        then: called instead of on_end. A request that is being given up already stays with what follows.
        """
        is_pending = request_id in self.intake
        if self.step is None and not is_pending:
            self._abort(request_id, then)
            if self.core.num_waiting:  # perhaps for what it held
                self.look_up()
        elif request_id not in self._aborts:
            if not is_pending:  # else it is given up as soon as the engine knows it
                self.intervene()
                self.look_up()
            self._aborts[request_id] = then

    def depart(self, request_id: int, then: Callable[[Sequence], None]) -> None:
        """Let a sequence go whose KV is in another replica now; when, as for `abort`."""
        if self.step is None:
            self._depart(request_id, then)
        else:
            self.intervene()
            self._departures[request_id] = then
        self.look_up()

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
        last_token_s = self.recorder.aborts(seq, now, is_lost=then is not None)
        self.core.abort(request_id)
        self._leave(seq)
        if then is None:
            self.recorder.requests.end(seq, Status.aborted, last_token_s, now)
            self._on_end(seq)
        else:
            self.later(now, Phase.arrive, then)

    def _depart(self, request_id: int, then: Callable[[Sequence], None]) -> None:
        """Free what a sequence holds that goes on elsewhere, if it is still here."""
        seq = self.core.abort(request_id, FinishReason.migrated)
        if seq is not None:
            self.recorder.departed(seq)
            self._leave(seq)
            then(seq)

    def _leave(self, seq: Sequence) -> None:
        """A request is outstanding no more."""
        self._uncount(seq)
        for notify in self._listeners.left:
            notify(seq)

    # Failures, and the end of the run.

    def slow_down(self, factor: float) -> None:
        """Let iterations take `factor` times as long, from the next on that begins; 1: as they should."""
        if factor != self._slowdown:
            self.intervene()
            self._slowdown = factor
            self.look_up()

    def crash(self) -> list[int]:
        """Lose the engine at this instant; returns the requests that it had taken in, by id.

        What its iterations up to now have produced was sent to the clients.
        """
        now = self._clock.now
        self._finish_until(now)
        lost = [seq for seq in self.core.unfinished if seq.request_id not in self._departures]
        pending, before = self.intake.entries(), self.core
        self.core = self.pool.core()
        self.core.num_iterations = self.core.block_pool.num_iterations = before.num_iterations
        self._take_transfers = self.core.transfers.take
        self.recorder.crashed(lost, pending, self.core, now)
        self._num_crashes += 1
        self.step = self._timer = None
        self._is_idle, self._wake_s = True, inf
        self.intake.clear()
        self._aborts.clear()
        self._departures.clear()
        self._uncount_all()
        self.copies.links = self.pool.links()
        for notify in self._listeners.crashed:
            notify(now)
        return sorted([*(seq.request_id for seq in lost), *(entry.request.request_id for entry in pending)])

    def stop(self, now: float) -> None:
        """End the simulation: enter the iterations that have ended by now, and how far the rest has come."""
        self._finish_until(now)
        self.recorder.stopped(self.intake.entries(), now)

    def _finish_until(self, now: float) -> None:
        """Commit those iterations of the running step that have ended."""
        step = self.step
        if step is not None:
            num_ended = bisect_right(step.ends_s, now)
            if num_ended:
                step.cut(num_ended)
                self._finish_step()

    def holds(self, request_id: int) -> bool:
        """Whether a request is in the engine, or on its way there."""
        return self.core.find(request_id) is not None or request_id in self.intake

    def has_adapter(self, name: str) -> bool:
        """Whether an adapter is on its GPU, or on its way there."""
        return self.core.residents is not None and self.core.residents.is_resident(name)
