"""The replica of the common run: it keeps to a lane until something comes that needs a whole engine.

While the lane lasts, `core` is empty and `step` None: `sim.engine.lane_loop` has the sequences and what they
do. Whatever a lane does not know - an abort, a preemption, a crash, contents to be shared, an attachment that
looks into a step - ends it at that instant (`leave_lane`): the engine takes over all sequences, and the
replica goes on as any other. Its records are the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from policies.core.lane import is_common, suits
from policies.core.limits import StopAfter
from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.engine.attachment import Attachment
from sim.engine.intake import Enter
from sim.engine.lane_loop import LaneLoop
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool
from sim.engine.run_context import RunContext
from sim.engine.running_step import RunningStep


class LaneReplica(Replica):
    """A replica that keeps to the lane for as long as it can."""

    def __init__(self, index: int, pool: ReplicaPool, context: RunContext) -> None:
        Replica.__init__(self, index, pool, context)
        self._loop: LaneLoop | None = None
        if pool.recv_interval == 1 and suits(self.core):
            self._loop = LaneLoop(
                self.core,
                self.recorder,
                pool,
                context.clock,
                max_leap=self._max_leap,
                on_enter=self._has_entered,
                on_prefilled=self._has_token,
                on_end=self._has_ended,
                leave=self._go_on,
            )

    @property
    def running_since_s(self) -> float:
        """Returns what `Replica.running_since_s` does."""
        loop = self._loop
        if loop is not None and loop.is_running:
            return loop.start_s
        step = self.step
        return inf if step is None else step.start_s

    def submit(self, request: Request, stop_after: StopAfter, not_before_s: float = 0.0) -> None:
        """Does what `Replica.submit` does."""
        loop = self._loop
        if loop is not None and (not_before_s or not is_common(request)):
            self.leave_lane()
            loop = None
        if loop is None:
            Replica.submit(self, request, stop_after, not_before_s)
            return
        seq = loop.lane.sequence_of(request, stop_after)
        num_tokens = request.prompt.num_tokens
        self.count_queued(seq.request_id, num_tokens)
        self.num_outstanding += 1
        self.num_outstanding_tokens += num_tokens
        for notify in self._listeners.sent:
            notify(request)
        now, frontend = self._clock.now, self.frontend
        if frontend is None:
            loop.expect(seq, now + self.pool.frontend_s)
        else:
            loop.expect(seq, frontend.known_s(now, request, stop_after))

    # What the loop tells.

    def _has_entered(self, seq: Sequence) -> None:
        """Reports that the engine knows a request."""
        for notify in self._listeners.entered:
            notify(seq)

    def _has_token(self, seq: Sequence, now: float) -> None:
        """Reports that a prefill has produced a token."""
        self.num_queued_tokens -= self._queued.pop(seq.request_id)
        for notify in self._listeners.prefilled:
            notify(seq, now)

    def _has_ended(self, seq: Sequence) -> None:
        """Reports that an answer is complete."""
        self.num_outstanding -= 1
        self.num_outstanding_tokens -= seq.request.prompt.num_tokens
        for notify in self._listeners.left:
            notify(seq)
        self._on_end(seq)

    def _go_on(self, now: float) -> None:
        """Leaves the lane, if it still lasts, after a step or between two, and continues with the engine."""
        self.leave_lane()
        if self._aborts or self._at_boundary:
            self._end_requests()
        if self._clock.is_quiet():
            self._begin_step(now)
        else:
            self._plan_at(now)

    # The end of the lane.

    def leave_lane(self) -> None:
        """Lets the engine take over all state of the lane, in the middle of a step or between two."""
        loop, core = self._loop, self.core
        if loop is None:
            return
        self._loop = None
        loop.is_over = True
        chunks = loop.chunks if loop.is_running else []
        loop.lane.give_to(core, self.recorder.iterations.next_iteration, chunks)
        for known_s, seq in loop.pending:
            self.intake.add(known_s, seq.request, core.enter, seq)
        self._is_idle, self._wake_s = loop.is_idle, loop.wake_s
        if loop.is_running:
            size = loop.num_decodes
            context = core.decodes.num_context_tokens + size if size else 0
            plan = core.resume(size, context, chunks, loop.waits_for, len(loop.ends_s))
            self.step = RunningStep(plan, loop.shape if chunks else None, loop.start_s, loop.ends_s)
            self._timer = self._clock.at(loop.end_s, self.index, self._on_boundary)
        elif loop.timer is not None:
            self._plan_at(loop.wake_s)
        loop.timer = None

    def attach(self, attachment: Attachment) -> None:
        """Leaves the lane if the attachment looks into steps; then as `Replica.attach`."""
        Replica.attach(self, attachment)
        on = self._listeners
        if on.planned or on.started or on.ending or on.transfers_prefilled or on.before_external_event:
            self.leave_lane()

    def expect(
        self, request: Request, known_s: float, enter: Enter, item: Any, sent_s: float | None = None
    ) -> None:
        """Leaves the lane; then as `Replica.expect`."""
        self.leave_lane()
        Replica.expect(self, request, known_s, enter, item, sent_s)

    def replan(self) -> None:
        """Leaves the lane; then as `Replica.replan`."""
        self.leave_lane()
        Replica.replan(self)

    def before_external_event(self) -> None:
        """Leaves the lane; then as `Replica.before_external_event`."""
        self.leave_lane()
        Replica.before_external_event(self)

    def abort(self, request_id: int, then: Callable[[], None] | None = None) -> None:
        """Leaves the lane; then as `Replica.abort`."""
        self.leave_lane()
        Replica.abort(self, request_id, then)

    def release_migrated(self, request_id: int, then: Callable[[Sequence], None]) -> None:
        """Leaves the lane; then as `Replica.release_migrated`."""
        self.leave_lane()
        Replica.release_migrated(self, request_id, then)

    def at_boundary(self, action: Callable[[], None]) -> None:
        """Leaves the lane; then as `Replica.at_boundary`."""
        self.leave_lane()
        Replica.at_boundary(self, action)

    def slow_down(self, factor: float) -> None:
        """Leaves the lane; then as `Replica.slow_down`."""
        self.leave_lane()
        Replica.slow_down(self, factor)

    def crash(self) -> list[int]:
        """Leaves the lane; then as `Replica.crash`."""
        self.leave_lane()
        return Replica.crash(self)

    def stop(self, now: float) -> None:
        """Leaves the lane; then as `Replica.stop`."""
        self.leave_lane()
        Replica.stop(self, now)

    def holds(self, request_id: int) -> bool:
        """Leaves the lane; then as `Replica.holds`."""
        self.leave_lane()
        return Replica.holds(self, request_id)
