"""The main loop of the common run with drafts: what `LaneLoop` does, for a `DraftLane`."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from hwmodels.iterations.iteration import DraftWork, IterationShape
from hwmodels.speculation.leaps import Leaps
from hwmodels.speculation.model import SpeculativeModel
from policies.core.engine import EngineCore
from policies.core.lane import Lane
from policies.core.lane_step import LaneView
from policies.core.limits import StopAfter
from policies.core.plan import Chunk
from policies.core.request import Request
from policies.core.sequence import Sequence
from policies.speculation import Proposer
from policies.speculation.engine.lane import DraftLane
from policies.speculation.engine.lane_step import DraftLaneStep
from sim.engine.clock import Clock
from sim.engine.lane_loop import LaneLoop
from sim.engine.recorder import Recorder
from sim.engine.replica_pool import ReplicaPool
from sim.speculation.acceptance import Acceptance
from sim.speculation.log import DraftLog


class DraftLaneLoop(LaneLoop):
    """The loop of one replica that speculates, from its beginning until it leaves the lane.

    acceptance, proposer, seed: say what is accepted. Others as for `LaneLoop`.
    """

    __slots__ = ("_acceptance", "_draft_log", "_pass_ends", "_price", "_proposer", "_seed", "draft_lane")

    def __init__(
        self,
        core: EngineCore,
        recorder: Recorder,
        pool: ReplicaPool,
        clock: Clock,
        *,
        acceptance: Acceptance,
        proposer: Proposer,
        seed: int,
        max_leap: int,
        on_enter: Callable[[Sequence], None],
        on_prefilled: Callable[[Sequence, float], None],
        on_end: Callable[[Sequence], None],
        leave: Callable[[float], None],
    ) -> None:
        LaneLoop.__init__(
            self,
            core,
            recorder,
            pool,
            clock,
            max_leap=max_leap,
            on_enter=on_enter,
            on_prefilled=on_prefilled,
            on_end=on_end,
            leave=leave,
        )
        self.lane = self.draft_lane = lane = DraftLane(core)
        self._view, self._step = LaneView(lane), DraftLaneStep(lane)
        self._acceptance, self._proposer, self._seed = acceptance, proposer, seed
        model = pool.model
        self._price = model.seconds
        leaps = model if isinstance(model, SpeculativeModel) else Leaps(model.seconds)
        self._pass_ends = leaps.pass_ends
        self._seconds = self._seconds_beside
        log = recorder.iterations
        assert isinstance(log, DraftLog)
        self._draft_log = log
        log.lane.num_rows, log.lane.num_levels = lane.num_rows, lane.num_levels
        lane.sums.on_run = log.lane.add_sums

    def may_serve(self, request: Request, stop_after: StopAfter) -> bool:
        """Returns whether the lane supports a request, and notes which drafts of it are accepted.

        Raises RejectedError if no engine can serve it.
        """
        lane = self.draft_lane
        num_positions = lane.num_positions(request, stop_after)
        if num_positions is None:
            return False
        verdicts = self._acceptance.verdicts(request, self._seed, num_positions, self._proposer)
        if verdicts.proposed is not None:
            return False
        lane.expect(request.request_id, verdicts.accepted)
        return True

    def _leap(self, now: float, horizon: int) -> None:
        """Begins up to `horizon` iterations in which all sequences decode."""
        lane, pending = self.draft_lane, self.pending
        sums, size = lane.sums, lane.decodes.size
        self.num_decodes = size
        num_iterations = horizon if horizon < self._max_leap else self._max_leap
        if pending and pending[0][0] <= now:
            num_iterations = 1
        begin = sums.clock - sums.first
        contexts = sums.computed[begin : begin + num_iterations] + size
        ends_s = self._pass_ends(now, size, contexts, lane.num_rows, lane.num_levels)
        if pending and num_iterations > 1:
            num_iterations = bisect_left(ends_s, pending[0][0]) + self._num_behind
            del ends_s[num_iterations:]
        self.is_running, self.is_idle = True, False
        self.start_s, self.ends_s = now, ends_s
        self.end_s = end_s = ends_s[-1]
        self.timer = self._clock.at(end_s, self._index, self.on_event)

    def _seconds_beside(self, shape: IterationShape) -> Any:
        """Returns the seconds of an iteration with prompt chunks, given its shape without drafts."""
        lane = self.draft_lane
        size, rows = shape.decode_seqs, lane.num_rows
        assert isinstance(size, int)
        num_tokens, num_next = size * rows, shape.sampled_seqs
        pairs = rows * (shape.decode_context_tokens - size) + size * (rows * (rows + 3) // 2)
        levels = lane.num_levels if num_next else 0
        work = DraftWork(num_tokens, pairs, num_next if rows else 0, levels, num_next * rows)
        return self._price(shape._replace(drafts=work, sampled_seqs=num_next + num_tokens))

    def _commit(self, lane: Lane, now: float) -> None:
        """Records what has run, and lets sequences advance, join and end."""
        if not self.num_decodes:
            self.draft_lane.sums.advance(1)
        LaneLoop._commit(self, lane, now)

    def _note_ended(self, ended: list[Sequence], now: float) -> None:
        """Records complete answers with their passes, and reports them."""
        add, passes_of = self._draft_log.lane.answers.add, self.draft_lane.passes_of
        for seq in ended:
            passes = passes_of(seq)
            add(passes, len(passes.tokens))
        LaneLoop._note_ended(self, ended, now)

    def _write_down(self, lane: Lane, size: int, chunks: list[Chunk]) -> None:
        """Records the iterations that have run, and the gaps between tokens that do not follow from them."""
        tokens, ends_s, draft_lane = self._tokens, self.ends_s, self.draft_lane
        emitted_s, num_apart = tokens.last_decode_s, 0
        if size:
            tokens.last_decode_s = self.end_s
            if tokens.apart:
                num_apart = len(tokens.apart)
                for seq, since_s in tokens.apart.items():
                    self._log.add_gap(seq.request_id, since_s, ends_s[0])
                tokens.apart.clear()
        num_next, num_context = size, lane.decodes.num_context_tokens + size if size else 0
        num_held = num_context + size * draft_lane.num_rows
        for seq in lane.prefilling:
            num_held += seq.stored_computed
        if lane.ending:
            num_held += lane.num_tokens_held_by_ending
        for chunk in chunks:
            num_next += chunk.completes
        num_surplus, log = lane.num_surplus, self._draft_log
        log.lane.add(len(ends_s), num_next, size - num_surplus, draft_lane.num_blocks_of_others)
        log.add_lane(
            self.start_s,
            ends_s,
            emitted_s,
            num_apart + num_surplus,
            num_decodes=size,
            num_running=lane.num_running,
            num_waiting=len(lane.waiting),
            num_blocks=lane.num_blocks - lane.num_free,
            num_context=num_context,
            num_held=num_held,
            shape=self.shape if chunks else None,
            waits_for=self.waits_for,
        )
