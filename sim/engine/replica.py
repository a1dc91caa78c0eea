"""Runs the main loop of one engine: plan, wait for as long as the hardware model says, commit.

The main loop is `_on_boundary`: `_finish_step` commits the iterations that have run, `_begin_step` plans the
next ones, computes their end times and schedules the end. A plan that holds for several iterations is run as
one event (a leap). An external event in the middle of a leap cuts it (`replan`): the leap then ends at the
first iteration boundary at or after the event, where a simulation of single iterations would have seen it.
`Recorder` records the events. Everything else is an attachment: see `sim.engine.attachment`.

In a pipeline `step` is the oldest of several batches in flight (see `BatchTimes`). The engine waits for it,
as vLLM's does: requests that arrive meanwhile are planned when it has ended. The module is long because it is
one object: the loop, leap cuts, crashes and aborts.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from simpy import Event

from hwmodels.iterations import IterationShape, JitterFactors
from policies.core.limits import StopAfter
from policies.core.plan import StepPlan, Transfer
from policies.core.request import Request
from policies.core.sequence import FinishReason, Sequence
from policies.gateway.load_counts import LoadCounts
from sim.engine.attachment import Attachment, Listeners
from sim.engine.clock import Phase
from sim.engine.frontend import Enter, Pending
from sim.engine.iteration_times import RunningStep, scaled_ends_s, shape_of
from sim.engine.recorder import Recorder
from sim.engine.replica_pool import Copies, ReplicaPool, RunContext
from sim.records.requests import Status
from sim.workload.distributions import stream

NO_TRANSFERS: Final[list[Transfer]] = []
MAX_LEAP = 1024  # iterations priced at once; if a leap is cut, the prices of the rest are wasted


class Replica(LoadCounts):
    """An engine on the simulated clock. It is a `policies.routing.ReplicaView`."""

    def __init__(self, index: int, pool: ReplicaPool, context: RunContext) -> None:
        self.index = index
        self.pool = pool
        self.price_usd_per_hour = pool.price_usd_per_hour
        self.core = core = pool.core()
        LoadCounts.__init__(self, core.block_pool.block_size, core.block_pool.num_blocks)
        self.frontend = pool.frontend_queue()
        self._passes = None
        if pool.new_passes is not None:
            self._passes = pool.new_passes(pool.model, core.max_num_seqs, context.seed)
        self.recorder = Recorder(
            *(index, core, context.requests, pool.frontend_s, context.seed, self.frontend_times, self._passes)
        )
        self.copies = Copies(pool.links(), self._load)
        self.intake = pool.intake(self._enter, lambda: self.core.num_iterations)
        self._clock = context.clock
        self._events_due = context.clock.events
        self._on_end = context.on_end
        self._decode_ends = pool.model.decode_ends
        self._max_leap = MAX_LEAP if context.leap else 1
        self._plan_phase = Phase.plan + index
        self._slowdown = 1.0
        self._factors: JitterFactors | None = None  # each belongs to one iteration number
        if pool.jitter is not None:
            self._factors = JitterFactors(pool.jitter, stream(context.seed, "jitter", index))
        self._batch_times = pool.batch_times()
        self._has_own_times = bool(self._passes or self._batch_times or pool.waits_for_ranks)
        self._scales_times = self._has_own_times or self._factors is not None
        self.step: RunningStep | None = None  # None: the replica is idle or between two steps
        self._behind: deque[RunningStep] = deque()  # in a pipeline, the batches that follow `step`
        self._timer: Event | None = None  # the valid event; a cut makes the event before it invalid
        self._wake_s = inf  # when an idle replica plans again
        self._is_idle = True  # the last plan found nothing to compute; a timer may wake the replica
        self._num_crashes = 0  # `schedule` drops actions that were scheduled before a crash
        # For the next iteration boundary: requests to abort (callbacks by request id), and other actions.
        self._aborts: dict[int, Callable[[], None] | None] = {}
        self._at_boundary: list[Callable[[], None]] = []
        self._migrated: set[int] = set()  # ids of the requests that one of these actions releases
        self._listeners = Listeners()

    @property
    def frontend_times(self) -> dict[int, float] | None:
        """The times of requests in the front end, s, by id; None: all take `pool.frontend_s`."""
        return None if self.frontend is None else self.frontend.taken_s

    def attach(self, attachment: Attachment) -> None:
        """Attaches a listener to the events of the replica; it is called after earlier ones."""
        self._listeners.add(attachment)

    # The main loop.

    def _on_boundary(self, event: Event) -> None:
        """Commits a step at its end, ends the requests that waited for this boundary, and plans again."""
        if event is not self._timer:
            return
        self._finish_step()
        if self._aborts or self._at_boundary:
            self._end_requests()
        now, queue = self._clock.now, self._events_due
        if queue and queue[0][0] <= now:  # other events are due at this time: plan after them
            self._plan_at(now)
        else:
            self._begin_step(now)

    def _on_plan(self, event: Event) -> None:
        """Plans at a time at which no step ends."""
        if event is self._timer:
            self._begin_step(self._clock.now)

    def _finish_step(self) -> None:
        """Commits the first step.num_iterations iterations of the running step."""
        step, intake, watchers = self.step, self.intake, self._listeners.ending
        assert step is not None
        self.step = self._timer = None
        end_s = step.end_s
        if watchers:
            for notify in watchers:
                notify(step, self._clock.now)
        outcome = self.recorder.ran(step)
        enters = intake.next_s < end_s
        if enters and intake.plans_ahead:
            intake.enter_during(step)
        prefilled, finished = self.core.commit(step.plan, outcome, end_s)
        if enters and not intake.plans_ahead:  # policies learn from the ends before new requests enter
            intake.enter_during(step)
        for seq in prefilled:
            self._prefilled(seq, end_s)
        for seq in finished:
            self.recorder.finished(seq, end_s)
            self._leave(seq)
            self._on_end(seq)
        if self._behind:
            self.step = self._behind.popleft()

    def _begin_step(self, now: float) -> None:
        """Begins the next step, if there is anything to compute; in a pipeline, as many steps as fit."""
        intake, batches = self.intake, self.core.batches
        self._timer = None
        if intake.next_s <= now:
            intake.enter_at(now, self._is_idle)
            if self._aborts:
                self._end_requests()
        while self.step is None or not (batches is None or batches.is_full or self._at_boundary):
            if not self._plan_step(now):
                break
        if self.step is None:
            self._go_idle(now)
        else:
            self._is_idle = False
            self._timer = self._clock.at(self.step.end_s, self.index, self._on_boundary)

    def _plan_step(self, now: float) -> bool:
        """Plans one step and starts it; returns whether there is anything to compute."""
        core, listeners = self.core, self._listeners
        plan = core.plan(now)
        transfers, delay_s = NO_TRANSFERS, 0.0
        if core.transfers.wanted or core.block_pool.stores:
            transfers = core.transfers.take()
            delay_s = self.copies.begin(transfers, now)
        if listeners.planned:
            for notify in listeners.planned:
                notify(plan, now)
        is_quiet = plan.is_unasked and self.recorder.events.is_quiet if plan else self.step is not None
        if transfers or not is_quiet:
            self.recorder.planned(plan, transfers, now)
        if plan is not None:
            self._start_step(plan, now, delay_s)
        if listeners.started:
            for notify_started in listeners.started:
                notify_started(self._behind[-1] if self._behind else self.step, now)
        return plan is not None

    def _start_step(self, plan: StepPlan, now: float, delay_s: float) -> None:
        """Computes the end times of a plan's iterations, and schedules the step's end at one of them."""
        horizon, num_decodes, shape = plan.horizon, plan.num_decodes, None
        if horizon > 1:
            horizon = 1 if delay_s or self.intake.next_s <= now else min(horizon, self._max_leap)
        if plan.chunks:
            shape = shape_of(plan, 0)
            ends = self._ends_s(plan, shape, horizon, now + delay_s)
        elif self._scales_times or plan.num_widening != num_decodes or plan.adapters is not None:
            ends = self._ends_s(plan, None, horizon, now + delay_s)
        else:
            ends = self._decode_ends(now + delay_s, num_decodes, plan.num_decode_context_tokens, horizon)
        if plan.until_s < ends[-1]:
            del ends[bisect_left(ends, plan.until_s) + 1 :]
        step = RunningStep(plan, shape, now, ends)
        if self.step is None:
            self.step = step
        else:
            newest = self._behind[-1] if self._behind else self.step
            step.start_s = max(now, newest.end_s)
            self._behind.append(step)
        if self.core.batches is not None:
            self.core.batches.depart(plan)
        if horizon > 1 and self.intake.next_s < ends[-1]:
            num_iterations = self.intake.num_iterations_before(step)
            if num_iterations < step.num_iterations:
                step.cut(num_iterations)

    def _ends_s(
        self, plan: StepPlan, shape: IterationShape | None, num_iterations: int, start_s: float
    ) -> list[float]:
        """Returns the end time of each iteration of a plan, including the current slowdown and jitter."""
        model, by_rank = self.pool.model, self.pool.waits_for_ranks
        if self._passes is not None:
            scale_by = self._slowdown, self._factors, by_rank
            return self._passes.ends_s(self.core, plan, shape, num_iterations, start_s, *scale_by)
        scale: float | NDArray[np.float64] = self._slowdown
        if self._factors is not None:
            factors = self._slowdown * self._factors.of(plan.index, num_iterations)
            scale = factors if num_iterations > 1 else float(factors[0])
        if self._batch_times is not None:
            return [self._batch_times.end_s(plan, shape, start_s, float(scale), by_rank)]
        return scaled_ends_s(model, plan, shape, num_iterations, start_s, scale, by_rank)

    def _go_idle(self, now: float) -> None:
        """Schedules the next plan of an idle replica: at `core.wake_s` or when the next request arrives."""
        self._is_idle = True
        self._wake_s = max(now, min(self.core.wake_s, self.intake.next_s))
        if self._wake_s < inf:
            self._plan_at(self._wake_s)

    def _plan_at(self, time_s: float) -> None:
        """Schedules a plan at time_s, after all other events of that time."""
        self._wake_s = time_s
        self._timer = self._clock.at(time_s, self._plan_phase, self._on_plan)

    def _cut(self, step: RunningStep, num_iterations: int) -> None:
        """Cuts a leap to num_iterations, unless it is already that short."""
        if num_iterations < step.num_iterations:
            step.cut(num_iterations)
            self._timer = self._clock.at(step.end_s, self.index, self._on_boundary)

    def replan(self) -> None:
        """Schedules a new plan at the first iteration boundary from now on, after an external event."""
        step = self.step
        if step is None:
            if self._timer is None or self._is_idle:
                self._plan_at(self._clock.now)
        elif step.num_iterations > 1:
            self._cut(step, bisect_left(step.ends_s, self._clock.now) + 1)

    def commit_and_replan(self, num_iterations: int) -> None:
        """Commits the first num_iterations of a leap, which have ended, and plans again at their end."""
        step = self.step
        assert step is not None
        step.cut(num_iterations)
        self._finish_step()
        self._begin_step(step.end_s)

    def before_external_event(self) -> None:
        """Notifies the listeners that must act before an external event, such as an abort or loaded KV."""
        for notify in self._listeners.before_external_event:
            notify()

    def schedule(self, time_s: float, phase: int, action: Callable[[], None]) -> None:
        """Schedules an action, which is dropped if the engine crashes before."""
        num_crashes = self._num_crashes

        def act(event: Event) -> None:
            if self._num_crashes == num_crashes:
                action()

        self._clock.at(time_s, phase, act)

    # Requests arrive.

    def submit(self, request: Request, stop_after: StopAfter, not_before_s: float = 0.0) -> None:
        """Accepts a request that ends (each branch of it) after stop_after output tokens.

        not_before_s: earliest time at which it can reach the engine, s.
        Raises RejectedError if the engine can never serve it.
        """
        core = self.core
        seq = core.sequence_of(request, stop_after)
        self.count_queued(request.request_id, request.prompt.num_tokens)
        self.expect(request, max(self.known_s(request, stop_after), not_before_s), core.enter, seq)

    def known_s(self, request: Request, stop_after: StopAfter) -> float:
        """Returns the time at which a request that the gateway sends now reaches the engine, s.

        stop_after: output tokens after which it ends.
        """
        if request.request_id in self._migrated:  # its last attempt is still here until the next boundary
            assert self.step is not None
            return self.step.boundary_s(self._clock.now)
        if self.frontend is not None:
            return self.frontend.known_s(self._clock.now, request, stop_after)
        return self._clock.now + self.pool.frontend_s

    def expect(
        self, request: Request, known_s: float, enter: Enter, item: Any, sent_s: float | None = None
    ) -> None:
        """Adds a request that will reach the engine at known_s, by enter(item). sent_s: see `Pending`."""
        self.num_outstanding += 1
        self.num_outstanding_tokens += request.prompt.num_tokens
        for notify in self._listeners.sent:
            notify(request)
        intake, step = self.intake, self.step
        is_next = known_s < intake.next_s
        intake.add(known_s, request, enter, item, sent_s)
        if not is_next:
            return
        if step is not None:
            if known_s < step.end_s:
                self._cut(step, intake.num_iterations_before(step))
        elif self._is_idle and known_s < self._wake_s:
            self._plan_at(known_s)

    def _enter(self, entry: Pending) -> None:
        """Adds a pending request to the engine."""
        seq = entry.enter(entry.item)
        self.recorder.events.enter(seq, entry.sent_s)
        for notify in self._listeners.entered:
            notify(seq)

    def take_in(self, request: Request, enter: Enter, item: Any) -> None:
        """Calls enter(item) between two steps to add a request that another replica is decoding."""
        self.num_outstanding += 1
        self.num_outstanding_tokens += request.prompt.num_tokens
        for notify in self._listeners.sent:
            notify(request)
        now = self._clock.now
        self._enter(Pending(now, 0, request, enter, item, now))

    def _load(self, request_id: int, done_s: float) -> None:
        """Schedules the completion of a KV load for which a sequence waits."""
        self.schedule(done_s, Phase.arrive, partial(self.loaded, request_id))

    def loaded(self, request_id: int) -> None:
        """Reports to the engine that the KV for which a sequence waits is loaded."""
        self.before_external_event()
        seq = self.core.loading.get(request_id)
        if seq is not None:
            self.recorder.events.loaded(seq, self._clock.now)
        self.core.loaded(request_id)
        self.replan()

    # Requests leave.

    def _prefilled(self, seq: Sequence, now: float) -> None:
        """Handles the token of a prefill: the sequence decodes here, unless it is transferred."""
        if self._queued:
            self.num_queued_tokens -= self._queued.pop(seq.request_id, 0)
        for begin_transfer in self._listeners.transfers_prefilled:
            if begin_transfer(seq, now):
                return
        self.recorder.prefilled(seq, now)
        for notify in self._listeners.prefilled:
            notify(seq, now)

    def abort(self, request_id: int, then: Callable[[], None] | None = None) -> None:
        """Aborts a request: now if no iteration is running, else at the next iteration boundary.

        A pending request is aborted in the same way when it reaches the engine.
        then: called in place of on_end. A second abort of the same request has no effect.
        """
        entry = self.intake.find(request_id)
        if entry is None and self.step is None:
            self._abort(request_id, then)
            if self.core.num_waiting:  # others may wait for its memory
                self.replan()
        elif request_id not in self._aborts:
            if entry is None:
                self.before_external_event()
                self.replan()
            elif entry.known_s >= self._clock.now:
                self.schedule(entry.known_s, Phase.abort, partial(self._abort_pending, entry))
            self._aborts[request_id] = then

    def _abort_pending(self, entry: Pending) -> None:
        """Ends an aborted request that has reached the engine, unless an iteration is running."""
        if self._is_idle if self.intake.plans_ahead else self.step is None:
            self.intake.enter_alone(entry)
            self._abort(entry.request.request_id, self._aborts.pop(entry.request.request_id))

    def release_migrated(self, request_id: int, then: Callable[[Sequence], None]) -> None:
        """Releases a sequence after the transfer of its KV to another replica, at the same time as `abort`.

        then: called with the sequence when its slot and blocks are free.
        """
        if self.step is not None:
            self._migrated.add(request_id)
        self.at_boundary(partial(self._release_migrated, request_id, then))

    def at_boundary(self, action: Callable[[], None]) -> None:
        """Runs an action between two steps: now if no iteration is running, else at the next boundary."""
        if self.step is None:
            action()
        else:
            self.before_external_event()
            self._at_boundary.append(action)
        self.replan()

    def _end_requests(self) -> None:
        """Aborts requests and runs the actions that waited for the end of the step.

        While batches of a pipeline are in flight, actions keep waiting, and no batch is planned.
        """
        aborts, self._aborts = self._aborts, {}
        for request_id, then in aborts.items():
            if request_id in self.intake:
                self._aborts[request_id] = then
            else:
                self._abort(request_id, then)
        if self.step is not None:
            return
        actions, self._at_boundary = self._at_boundary, []
        self._migrated.clear()
        for act in actions:
            act()

    def _abort(self, request_id: int, then: Callable[[], None] | None) -> None:
        """Aborts a request, if it is still here."""
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
            self.schedule(now, Phase.arrive, then)

    def _release_migrated(self, request_id: int, then: Callable[[Sequence], None]) -> None:
        """Frees slot and blocks of a sequence that another replica continues, if it is still here."""
        seq = self.core.abort(request_id, FinishReason.migrated)
        if seq is not None:
            self.recorder.migrated(seq)
            self._leave(seq)
            then(seq)

    def _leave(self, seq: Sequence) -> None:
        """Removes a request that has ended here from the counts, and notifies the listeners."""
        self._uncount(seq)
        for notify in self._listeners.left:
            notify(seq)

    # What befalls the replica.

    @property
    def running_since_s(self) -> float:
        """Returns the start time of the running iterations, s; inf if none are running."""
        return inf if self.step is None else self.step.start_s

    def slow_down(self, factor: float) -> None:
        """Multiplies the duration of iterations that begin from now on by `factor`; 1: normal speed."""
        if factor != self._slowdown:
            self.before_external_event()
            self._slowdown = factor
            self._scales_times = self._has_own_times or self._factors is not None or factor != 1
            self.replan()

    def crash(self) -> list[int]:
        """Replaces the engine by an empty one; returns the ids of the requests that are lost, sorted.

        The tokens of iterations that have ended by now have been sent to the clients.
        """
        now = self._clock.now
        self._finish_until(now, begins_at_now=False)
        lost = [seq for seq in self.core.unfinished if seq.request_id not in self._migrated]
        pending, before = self.intake.entries(), self.core
        self.core = self.pool.core()
        self.core.num_iterations = self.core.block_pool.num_iterations = before.num_iterations
        self.recorder.crashed(lost, pending, self.core, now)
        self._num_crashes += 1
        if self.frontend is not None:
            self.frontend.reset()
        self.step = self._timer = None
        self._behind.clear()
        self._batch_times = self.pool.batch_times()
        self._is_idle, self._wake_s = True, inf
        self.intake.clear()
        self._aborts.clear()
        self._at_boundary.clear()
        self._migrated.clear()
        self._uncount_all()
        self.copies.links = self.pool.links()
        for notify in self._listeners.crashed:
            notify(now)
        return sorted([*(seq.request_id for seq in lost), *(entry.request.request_id for entry in pending)])

    def stop(self, now: float) -> None:
        """Ends the run: records the iterations that have ended, and the progress of unfinished requests."""
        self._finish_until(now, begins_at_now=not self._clock.is_stopped)
        self.recorder.stopped(self.intake.entries(), now)

    def _finish_until(self, now: float, *, begins_at_now: bool) -> None:
        """Commits the iterations that have ended by `now`. begins_at_now: whether the next begins then."""
        step = self.step
        if step is not None and (num_ended := step.num_ended(now)):
            num_blocks = 0
            if num_ended < step.num_iterations and (begins_at_now or step.ends_s[num_ended - 1] < now):
                blocks_after = partial(self.core.blocks_of_repeats, step.plan)
                num_blocks = blocks_after(num_ended) - blocks_after(num_ended - 1)
            step.cut(num_ended)
            self._finish_step()
            self.core.block_pool.take(num_blocks)  # the tokens of the iteration in progress

    def holds(self, request_id: int) -> bool:
        """Returns whether a request is in the engine or on its way to it."""
        return self.core.find(request_id) is not None or request_id in self.intake

    def has_adapter(self, name: str) -> bool:
        """Returns whether an adapter is in GPU memory or is being loaded."""
        return self.core.residents is not None and self.core.residents.is_resident(name)
