"""The main loop of the common run: what `Replica` does, for an engine that is a `policies.core.lane.Lane`.

    on_event    a step has run: _commit writes it down, lets sequences advance, join and end
                then plan and price the next one: _decode if all decode, else _ask

A request costs a few numbers here. What a lane does not know ends it: see `sim.engine.lane_replica`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from math import inf, isnan
from typing import Final

from simpy import Event

from hwmodels.iterations.iteration import IterationShape
from policies.core.engine import EngineCore
from policies.core.lane import Lane
from policies.core.lane_step import LaneStep, LaneView
from policies.core.plan import Cause, Chunk, StepPlan
from policies.core.sequence import Sequence
from sim.engine.clock import Clock, Phase
from sim.engine.recorder import Recorder
from sim.engine.replica_pool import ReplicaPool
from sim.engine.shape import shape_of_chunks

NO_CHUNKS: Final[list[Chunk]] = []
NONE: Final[list[Sequence]] = []


def _known_s(pending: tuple[float, Sequence]) -> float:
    """Returns the time at which the engine knows a pending sequence, s."""
    return pending[0]


class LaneLoop:
    """The loop of one replica, from its beginning until it leaves the lane.

    max_leap: iterations priced at once. on_enter, on_prefilled, on_end are called with sequences that the
    engine knows from now on, that have a first token, and that have ended. leave(now) ends the lane, and
    plans as any replica does.
    """

    __slots__ = (
        "_clock",
        "_core",
        "_decode_ends",
        "_events",
        "_fill",
        "_index",
        "_leave",
        "_log",
        "_max_leap",
        "_num_behind",
        "_on_end",
        "_on_enter",
        "_on_prefilled",
        "_plans_ahead",
        "_requests",
        "_seconds",
        "_step",
        "_tokens",
        "_view",
        "chunks",
        "end_s",
        "ends_s",
        "is_idle",
        "is_over",
        "is_running",
        "lane",
        "num_decodes",
        "pending",
        "shape",
        "start_s",
        "timer",
        "waits_for",
        "wake_s",
    )

    def __init__(
        self,
        core: EngineCore,
        recorder: Recorder,
        pool: ReplicaPool,
        clock: Clock,
        *,
        max_leap: int,
        on_enter: Callable[[Sequence], None],
        on_prefilled: Callable[[Sequence, float], None],
        on_end: Callable[[Sequence], None],
        leave: Callable[[float], None],
    ) -> None:
        self.lane = lane = Lane(core)
        self._core = core
        self._clock, self._index = clock, recorder.replica
        self._fill, self._view, self._step = core.batching.fill, LaneView(lane), LaneStep(lane)
        self._decode_ends, self._seconds = pool.model.decode_ends, pool.model.seconds
        self._log, self._tokens, self._events = recorder.iterations, recorder.tokens, recorder.events
        self._requests = recorder.requests
        self._max_leap = max_leap
        self._plans_ahead, self._num_behind = pool.plans_ahead, 2 if pool.plans_ahead else 1
        self._on_enter, self._on_prefilled, self._on_end = on_enter, on_prefilled, on_end
        self._leave = leave
        self.pending: deque[tuple[float, Sequence]] = deque()
        """Sequences on their way to the engine, and when it knows them."""
        self.timer: Event | None = None
        self.wake_s = inf
        self.is_idle = True
        self.is_over = False
        """Whether the replica has left the lane."""
        # The step that runs, if one does.
        self.is_running = False
        self.start_s = self.end_s = 0.0
        self.ends_s: list[float] = []
        self.num_decodes = 0
        self.chunks = NO_CHUNKS
        self.shape: IterationShape | None = None
        self.waits_for: Cause | None = None

    def on_event(self, event: Event) -> None:
        """Handles the end of a step, or the time to plan one."""
        if event is not self.timer:
            return
        self.timer = None
        now, lane = self._clock.now, self.lane
        if self.is_running:
            self._commit(lane, now)
            if self.is_over:
                self._leave(now)
                return
            if not self._clock.is_quiet():  # others act at this very instant: plan after them
                self._plan_at(now)
                return
        if self.pending and self.pending[0][0] <= now:
            self._enter_at(now)
        if lane.waiting or lane.prefilling:
            self._ask(lane, now)
        elif lane.decodes.size:
            self._decode(lane, now)
        else:
            self._rest(now)

    def _commit(self, lane: Lane, now: float) -> None:
        """Records what has run, and lets sequences advance, join and end."""
        chunks, size = self.chunks, self.num_decodes
        self.is_running = False
        self._write_down(lane, size, chunks)
        if self.pending and self.pending[0][0] < now:
            self._enter_during()
        if lane.ending:
            lane.free_ending()
        ended = lane.advance(len(self.ends_s)) if size else []
        prefilled = self._commit_chunks(chunks, ended) if chunks else NONE
        if ended:
            lane.end(ended)
        if prefilled:
            self._note_prefilled(prefilled, now)
        if ended:
            self._note_ended(ended, now)

    def _commit_chunks(self, chunks: list[Chunk], ended: list[Sequence]) -> list[Sequence]:
        """Advances prefills; returns those that are complete.

        Adds sequences to `ended` that end with their first token.
        """
        lane, num_prefills, prefilled = self.lane, self._requests.prefill_iterations, []
        for seq, num_cached, num_tokens, completes in chunks:
            num_prefills[seq.request_id] += 1
            seq.stored_computed = num_cached + num_tokens
            if completes:
                prefilled.append(seq)
                if lane.complete(seq):
                    ended.append(seq)
        return prefilled

    def _note_prefilled(self, prefilled: list[Sequence], now: float) -> None:
        """Records the first tokens of complete prefills, and reports them."""
        apart, first_token_s, tell = self._tokens.apart, self._requests.first_token_s, self._on_prefilled
        for seq in prefilled:
            first_token_s[seq.request_id] = apart[seq] = now
            tell(seq, now)

    def _note_ended(self, ended: list[Sequence], now: float) -> None:
        """Records complete answers, and reports them."""
        tokens, requests, tell = self._tokens, self._requests, self._on_end
        for seq in ended:
            if tokens.apart:
                tokens.forget(seq)
            requests.finish(seq, now)
            tell(seq)

    def _decode(self, lane: Lane, now: float) -> None:
        """Begins iterations in which all sequences decode: no decision until one ends, or a request comes."""
        horizon = lane.begin_decodes()
        if not horizon:
            self._leave(now)
            return
        self.chunks, self.waits_for = NO_CHUNKS, None
        if self._events.cause is not None:
            self._tell(now, [], None)
        self._leap(now, horizon)

    def _leap(self, now: float, horizon: int) -> None:
        """Begins up to `horizon` iterations in which all sequences decode."""
        decodes, pending = self.lane.decodes, self.pending
        size = self.num_decodes = decodes.size
        num_iterations = horizon if horizon < self._max_leap else self._max_leap
        if pending and pending[0][0] <= now:
            num_iterations = 1
        ends_s = self._decode_ends(now, size, decodes.num_context_tokens + size, num_iterations)
        if pending and num_iterations > 1:
            num_iterations = bisect_left(ends_s, pending[0][0]) + self._num_behind
            del ends_s[num_iterations:]
        self.is_running, self.is_idle = True, False
        self.start_s, self.ends_s = now, ends_s
        self.end_s = end_s = ends_s[-1]
        self.timer = self._clock.at(end_s, self._index, self.on_event)

    def _ask(self, lane: Lane, now: float) -> None:
        """Asks the policy for a step, because requests wait or are in prefill."""
        step, events, requests = self._step, self._events, self._requests
        if not lane.is_safe():
            self._leave(now)
            return
        size = lane.decodes.size
        step.begin()
        self._fill(self._view, step, now)  # type: ignore[arg-type]
        self.chunks = chunks = step.chunks
        admitted, waits_for = step.admitted, None
        if not (size or chunks):
            if lane.ending:
                lane.free_ending()
                self._ask(lane, now)
            else:
                self._leave(now)
            return
        if lane.waiting:
            waits_for = Cause.policy if step.refusal is None else step.refusal
        self.waits_for = waits_for
        if waits_for is None and events.cause is None and len(admitted) == len(events.new):
            events.admit(now)
        else:
            self._tell(now, admitted, waits_for)
        for seq in admitted:
            if requests.lost_kv:
                requests.schedule(seq, now)
            elif isnan(requests.scheduled_s[seq.request_id]):
                requests.scheduled_s[seq.request_id] = now
        if not chunks:
            self._leap(now, lane.horizon() if step.promise > 1 and not lane.ending else 1)
            return
        self.num_decodes = size
        context = lane.decodes.num_context_tokens + size if size else 0
        self.shape = shape = shape_of_chunks(size, context, chunks)
        self.is_running, self.is_idle = True, False
        self.start_s = now
        self.end_s = end_s = now + float(self._seconds(shape))
        self.ends_s = [end_s]
        self.timer = self._clock.at(end_s, self._index, self.on_event)

    def _rest(self, now: float) -> None:
        """Waits for the next request, because there is nothing to compute."""
        if self.lane.ending:
            self.lane.free_ending()
        if self._events.cause is not None:
            self._events.planned(self._core, None, [], now)
        self.is_idle = True
        self.wake_s = inf
        if self.pending:
            self._plan_at(max(now, self.pending[0][0]))

    def _plan_at(self, time_s: float) -> None:
        """Schedules the next plan at a time, after all other events of that instant."""
        self.wake_s = time_s
        self.timer = self._clock.at(time_s, Phase.plan + self._index, self.on_event)

    # Requests come; see `sim.engine.intake`.

    def expect(self, seq: Sequence, known_s: float) -> None:
        """Registers a request that the engine will know at known_s."""
        pending = self.pending
        if pending and known_s < pending[-1][0]:
            insort(pending, (known_s, seq), key=_known_s)
        else:
            pending.append((known_s, seq))
        if pending[0][1] is not seq:
            return
        if self.is_running:
            if known_s < self.end_s:
                self._cut(known_s)
        elif self.is_idle and known_s < self.wake_s:
            self._plan_at(known_s)

    def _cut(self, known_s: float) -> None:
        """Ends a leap at the boundary at which a request is planned for."""
        ends_s = self.ends_s
        num_iterations = 1
        if known_s > self.start_s:
            num_iterations = bisect_left(ends_s, known_s) + self._num_behind
        if num_iterations < len(ends_s):
            del ends_s[num_iterations:]
            self.end_s = ends_s[-1]
            self.timer = self._clock.at(self.end_s, self._index, self.on_event)

    def _enter_during(self) -> None:
        """Adds the requests that the engine has come to know before the end of the step that has run."""
        pending, ends_s, end_s = self.pending, self.ends_s, self.end_s
        until_s = end_s
        if self._plans_ahead:
            until_s = ends_s[-2] if len(ends_s) > 1 else self.start_s
        while pending and pending[0][0] <= until_s and pending[0][0] < end_s:
            self._enter()

    def _enter_at(self, now: float) -> None:
        """Adds the requests that have reached an idle engine.

        One that plans ahead is only woken, by the first request.
        """
        if self._plans_ahead:
            if self.is_idle:
                self._enter()
            return
        while self.pending and self.pending[0][0] <= now:
            self._enter()

    def _enter(self) -> None:
        _, seq = self.pending.popleft()
        self.lane.enter(seq)
        self._events.new.append(seq)
        self._on_enter(seq)

    # What is written down.

    def _tell(self, now: float, admitted: list[Sequence], waits_for: Cause | None) -> None:
        """Logs the events of a plan at which some requests wait or have waited."""
        plan = StepPlan(0, 0, 0, 0, (), 1, inf, self.chunks, admitted, waits_for=waits_for)
        self._events.planned(self._core, plan, [], now)

    def _write_down(self, lane: Lane, size: int, chunks: list[Chunk]) -> None:
        """Records the iterations that have run, and the gaps between tokens that do not follow from them."""
        log, tokens, ends_s = self._log, self._tokens, self.ends_s
        emitted_s, num_apart, num_used = tokens.last_decode_s, 0, lane.num_blocks - lane.num_free
        if size:
            tokens.last_decode_s = self.end_s
            if tokens.apart:
                num_apart = len(tokens.apart)
                for seq, since_s in tokens.apart.items():
                    log.add_gap(seq.request_id, since_s, ends_s[0])
                tokens.apart.clear()
        num_apart += lane.num_surplus
        num_running = lane.num_running
        if num_running == size and not lane.waiting:
            log.add_decodes(self.start_s, ends_s, emitted_s, num_apart, lane.decodes, num_used)
            return
        num_held = lane.decodes.num_context_tokens + size
        for seq in lane.prefilling:
            num_held += seq.stored_computed
        if lane.ending:
            num_held += lane.num_tokens_held_by_ending
        log.add_beside(
            self.start_s,
            ends_s,
            emitted_s,
            num_apart,
            lane.decodes,
            num_used,
            num_decodes=size,
            num_running=num_running,
            num_held=num_held,
            shape=self.shape if chunks else None,
            num_waiting=len(lane.waiting),
            waits_for=self.waits_for,
        )
