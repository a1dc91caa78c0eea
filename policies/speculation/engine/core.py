"""The serving loop of an engine that speculates.

`SpeculativeCore` is an `EngineCore` in which a decode is a pass over 1 + K tokens, of which 1 to K + 1 stay.
The executor says in `StepOutcome.accepted` how many draft tokens were right. A plan that holds for several
iterations ends with the first of them in which a sequence ends or KV blocks run out, which depends on what is
accepted: `num_iterations_of` finds it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from policies.caching.pool import BlockPool
from policies.core.async_engine import AsyncEngineCore
from policies.core.engine import EngineCore
from policies.core.limits import Bounds, RejectedError, StopAfter
from policies.core.plan import Cause, Chunk, Progress, StepOutcome, StepPlan
from policies.core.request import Request
from policies.core.sequence import DECODING, ENDING, WAITING, FinishReason, Sequence
from policies.core.state import EngineState
from policies.speculation.engine.draft_set import DraftSet
from policies.speculation.engine.drafts import DraftPlan, Ints, Shapes, Speculation, check_accepted
from policies.speculation.engine.iterations import Reservation, iterations_to_event
from policies.speculation.engine.running import DraftRunningSet
from policies.speculation.engine.step import DraftStep
from policies.speculation.engine.watch import DraftWatch

if TYPE_CHECKING:
    Engine = EngineCore
else:
    Engine = object


class Speculating(Engine):
    """Adds the verification of draft tokens to an `EngineCore`.

    A mixin, as compiled classes (`make compiled`) cannot have two compiled bases.
    """

    _reads_late: ClassVar[bool] = False
    """Whether the tokens of a step are read when the next one is planned."""
    drafting: DraftSet
    """The set of the decoding sequences."""
    _reservation: Reservation  # valid while iterations are reserved

    def __init__(self, *, speculation: Speculation, **settings: Any) -> None:
        self.speculation = replace(speculation, draft_length=deepcopy(speculation.draft_length))
        rules, pool = speculation.proposer.rules, settings["block_pool"]
        pool.drops_last_block = rules.drops_last_block
        pool.num_reprefillable_tokens = max(rules.prefill_lookahead - 1, 0)
        super().__init__(**settings)
        self._state.max_tokens_per_pass = 1 + Shapes(speculation.proposer).max_depth
        self.drafting.reads_late = self._reads_late
        self.watch = DraftWatch(self.speculation, self.view, self.drafting, reads_late=self._reads_late)

    def _new_running_set(self, pool: BlockPool, max_num_seqs: int) -> DraftRunningSet:
        running_set = DraftRunningSet(pool, max_num_seqs, self.max_model_len)
        self.drafting = running_set.drafting
        return running_set

    def _new_step(self, state: EngineState) -> DraftStep:
        max_inputs = getattr(self.batching, "max_num_batched_tokens", 0)
        return DraftStep(state, self.speculation, self.drafting, max_inputs)

    def bounds_of(self, request: Request, stop_after: StopAfter = None) -> Bounds:
        """Returns the number of known tokens at which a request would end here, and the reason.

        Raises RejectedError as `EngineCore.bounds_of` does, and for a request with branches.
        """
        self._check_branching(request)
        return super().bounds_of(request, stop_after)

    def sequence_of(self, request: Request, stop_after: StopAfter = None) -> Sequence:
        """Returns a sequence for a request that will be added later, by `enter`."""
        self._check_branching(request)
        return super().sequence_of(request, stop_after)

    @staticmethod
    def _check_branching(request: Request) -> None:
        if request.branching is not None:
            raise RejectedError(
                f"{request.branching.width} branches: an engine that speculates serves one answer per "
                "request; choose speculation=none, or send each branch as a request"
            )

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step, as `EngineCore.plan` does; its `drafts` are the draft tokens to verify."""
        plan = super().plan(now)
        if plan is not None:
            assert isinstance(plan.drafts, DraftPlan)
            try:
                self.watch.decide(plan, plan.drafts, now, self._step.tokens_left)
            except Exception:
                self.cancel(plan)  # no plan is in flight after a failed call
                raise
        return plan

    def _plan_unasked(self) -> StepPlan | None:
        """Returns a step that decodes all sequences, while nothing changes; None: policies must be called."""
        decodes = self.drafting
        if decodes.size + self._num_held != len(self._sequences) or not decodes.size:
            return None
        num_tokens = decodes.size + int(decodes.drafts_S[decodes.slots].sum())
        if num_tokens > self._max_unasked or self._lost or self._arrived:
            return None
        step = self._step
        assert isinstance(step, DraftStep)
        step.begin()
        step.budget(self._max_unasked)
        if not step.decode_together():
            return None
        step.repeat()
        return step.end()

    def resume(
        self,
        num_decodes: int,
        num_context_tokens: int,
        chunks: SequenceOf[Chunk],
        waits_for: Cause | None,
        horizon: int,
    ) -> StepPlan:
        """Returns the plan in flight of sequences that the engine has taken over, as `EngineCore.resume`."""
        plan = super().resume(num_decodes, num_context_tokens, chunks, waits_for, horizon)
        step = self._step
        assert isinstance(step, DraftStep)
        plan.drafts = drafts = step.drafts_in_flight(num_decodes > 0)
        plan.num_widening = 0
        self.watch.decide(plan, drafts, self._now, 0)
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan, as `EngineCore.commit` does.

        outcome.accepted: accepted draft tokens [iterations, sequences of plan.drafts].
        """
        drafts = plan.drafts
        assert isinstance(drafts, DraftPlan)
        check_accepted(drafts, outcome.accepted, outcome.iterations)
        if self._num_reserved:
            self._check_commit(plan, outcome.iterations, now)
            self._reservation.settle(drafts, outcome.accepted)
        self._record(drafts, outcome)
        if not plan.num_decodes:
            self.drafting.rest()
        progress = super().commit(plan, outcome, now)
        self._set_next(drafts, outcome)
        self.watch.committed(progress, now)
        return progress

    def _record(self, drafts: DraftPlan, outcome: StepOutcome) -> None:
        """Records the acceptances of a plan that is about to be committed."""
        self.watch.record(drafts, outcome)

    def _set_next(self, drafts: DraftPlan, outcome: StepOutcome) -> None:
        """Sets the draft tokens of the next pass of each sequence that got a token."""
        num_next = drafts.next_drafts if outcome.proposed is None else outcome.proposed
        decodes, num_decodes = self.drafting, len(drafts.seqs)
        decodes.drafts_S[drafts.slots] = num_next[:num_decodes]
        for seq, num in zip(drafts.next_seqs[num_decodes:], num_next[num_decodes:].tolist(), strict=True):
            if seq.state is DECODING:
                decodes.drafts_S[seq.slot] = num
                if decodes.reads_late:
                    decodes.base_S[seq.slot] += drafts.padded.get(seq.request_id, 0)

    def _advance(self, plan: StepPlan, outcome: StepOutcome) -> list[Sequence]:
        drafts, accepted = plan.drafts, outcome.accepted
        assert isinstance(drafts, DraftPlan)
        is_member = self.drafting.is_member_S[drafts.slots]
        if not is_member.all():  # others had ended before this step; see `AsyncEngineCore`
            kept = np.flatnonzero(is_member)
            return self.drafting.advance_by(drafts.part(kept), accepted[:, kept])
        return self.drafting.advance_by(drafts, accepted)

    def _take_repeats(self, plan: StepPlan, num_repeats: int) -> None:
        """Does nothing: `num_iterations_of` takes the blocks."""

    def num_iterations_of(self, plan: StepPlan, accepted: Ints) -> tuple[int, Ints]:
        """Returns the iterations until the first event, and the KV blocks that each takes after the first.

        accepted: draft tokens that would be accepted [iterations, sequences]. The last iteration is the first
        in which a sequence ends, or the one before blocks run out or the model's context may be full.
        """
        drafts = plan.drafts
        assert isinstance(drafts, DraftPlan)
        assert isinstance(self._step, DraftStep)
        return iterations_to_event(drafts, accepted, self.drafting, self._step, self.block_pool)

    def take_blocks_of(self, plan: StepPlan, num_iterations: int) -> None:
        """Takes the KV blocks of the iterations after the first, which `num_iterations_of` has found."""
        drafts = plan.drafts
        assert isinstance(drafts, DraftPlan)
        if num_iterations > 1:
            self.block_pool.take(int(drafts.num_new_blocks[num_iterations - 1]))
            self.drafting.blocks_S[drafts.slots] = drafts.num_blocks[num_iterations - 1]

    def blocks_of_repeats(self, plan: StepPlan, num_repeats: int) -> int:
        """Returns the blocks of further iterations, which `num_iterations_of` has found."""
        assert isinstance(plan.drafts, DraftPlan)
        return int(plan.drafts.num_new_blocks[num_repeats])

    def max_iterations_of(self, plan: StepPlan, limit: int) -> int:
        """Returns how many iterations of a plan, up to limit, may run before what they accept is read.

        Whatever they accept, they have no event before the last one and need no block with content.
        """
        assert isinstance(plan.drafts, DraftPlan)
        worst = np.tile(plan.drafts.depth, (min(limit, plan.horizon), 1))
        num_iterations, num_blocks = self.num_iterations_of(plan, worst)
        while (
            num_iterations > 1 and num_blocks[num_iterations - 1] > self.block_pool.num_free_without_content
        ):
            num_iterations -= 1
        return num_iterations

    def reserve(self, plan: StepPlan, num_iterations: int) -> None:
        """Takes the KV blocks of num_iterations iterations of the plan in flight before they are run.

        They are those of the worst case, in which every draft token is accepted: `drafting.blocks_S` counts
        them. The commit, of exactly num_iterations, frees those that were not needed. num_iterations: from
        `max_iterations_of`. Raises ValueError as `EngineCore.reserve` does.
        """
        if plan is not self._in_flight or not 1 <= num_iterations <= plan.horizon:
            raise ValueError(
                f"reserve for {num_iterations} iterations: must be of the plan in flight, within its horizon"
            )
        if self._num_reserved:
            raise ValueError(f"reserve: {self._num_reserved} iterations of this plan are reserved already")
        drafts, step = plan.drafts, self._step
        assert isinstance(drafts, DraftPlan)
        assert isinstance(step, DraftStep)
        if num_iterations > 1:
            self._num_reserved = num_iterations
            self._reservation = Reservation(drafts, self.drafting, step, self.block_pool)
            self.take_blocks_of(plan, num_iterations)


class SpeculativeCore(Speculating, EngineCore):
    """An `EngineCore` that verifies draft tokens. Its other arguments are those of `EngineCore`."""


class AsyncSpeculativeCore(Speculating, AsyncEngineCore):
    """A `SpeculativeCore` that plans a step before the tokens of the step before are known.

    It counts all draft tokens of the step in flight as computed until they have been read, as vLLM does. What
    a step has accepted, and which sequences have ended with it, does not reach the next plan. So an executor
    may say it late, and the plans are the same:

        simulator     plan 1 | commit 1 with acceptances | plan 2 | commit 2 with acceptances | plan 3
        real engine   plan 1 | commit 1 without | plan 2 | read 1 | commit 2 without | plan 3 | read 2 ...

    A commit without acceptances (`StepOutcome.accepted` is None) gives each decoding sequence the one token
    that is certain and ends those that reach their limit with it; `read` gives the others.
    """

    _reads_late: ClassVar[bool] = True

    def __init__(self, *, speculation: Speculation, **settings: Any) -> None:
        self._late: StepPlan | None = None  # committed; its acceptances are not known yet
        super().__init__(speculation=speculation, **settings)

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step, as `AsyncEngineCore.plan` does.

        If it returns None after a commit without acceptances, these must be read before the next call.
        """
        if self._late is not None:
            return super().plan(now)
        decodes = self.drafting
        decodes.hide()
        plan = super().plan(now)
        decodes.show(plan)
        if plan is None:
            self.watch.read()
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan, as `SpeculativeCore.commit` does.

        outcome.accepted=None: `read` will say after the next call of `plan` what one iteration has accepted;
        the proposer must have drafted as many tokens as it was asked for. Then the sequences are returned
        that are certain to have ended.
        """
        if self._late is not None:
            raise ValueError(
                "commit: read must be called first for the step before, which had no acceptances"
            )
        self._offer_read()
        if outcome.accepted is None:
            if outcome.iterations != 1 or outcome.proposed is not None:
                raise ValueError(
                    f"commit of {outcome.iterations} iterations without acceptances: must be of 1, and "
                    "without outcome.proposed"
                )
            assert isinstance(plan.drafts, DraftPlan)
            outcome = outcome._replace(accepted=np.zeros((1, len(plan.drafts.seqs)), np.int64))
            self._late = plan
        progress = super().commit(plan, outcome, now)
        if self._late is not None:
            self.drafting.unread = None
        return progress

    def read(self, plan: StepPlan, accepted: Ints, stopped: Iterable[Sequence] = ()) -> list[Sequence]:
        """Applies the acceptances of a plan that was committed without; returns the sequences that ended.

        Must be called after the next call of `plan`, and before the plan that it may have returned is
        committed. accepted: accepted draft tokens [1, sequences of plan.drafts], up to the stop token of a
        sequence that stops. stopped: sequences with a stop token in this step. Sequences that have ended
        before are ignored. A sequence that the next plan has preempted ends at once, and leaves that plan's
        list; others hold slot and blocks until the next commit. What the commit of this plan has returned is
        not returned again.
        """
        if plan is not self._late:
            raise ValueError("read: must be of the plan that was committed last, without acceptances")
        drafts, decodes = plan.drafts, self.drafting
        assert isinstance(drafts, DraftPlan)
        check_accepted(drafts, accepted, 1)
        self._late = None
        self.watch.read(drafts, accepted)
        certain = drafts.num_computed + 1
        after = certain + accepted[0]
        ends = np.flatnonzero((after >= drafts.end) & (certain < drafts.end)).tolist()
        decodes.add_kept(drafts, np.minimum(after, drafts.end) - certain)
        finished = [drafts.seqs[index] for index in ends if drafts.seqs[index].finish_reason is None]
        for seq in stopped:
            if seq.finish_reason is None:
                seq._end_reason = FinishReason.stop
                if seq not in finished:
                    finished.append(seq)
        self._end_read(finished)
        self.watch.ended(finished)
        if self._in_flight is not None:
            decodes.update(self._in_flight)
            return finished
        self._offer_read()
        decodes.rest()
        self._free_ending()
        return finished

    def max_iterations_of(self, plan: StepPlan, limit: int) -> int:
        """Returns how many iterations of a plan may run, as `SpeculativeCore` does; 1 before `read`."""
        return 1 if self._late is not None else super().max_iterations_of(plan, limit)

    def _end_read(self, finished: list[Sequence]) -> None:
        """Ends sequences that turn out to have ended with the step before."""
        plan = self._in_flight
        for seq in finished:
            if seq.state is WAITING:
                if plan is not None:
                    plan.preempted = [other for other in plan.preempted if other is not seq]
                self._lost = [other for other in self._lost if other is not seq]
                self._state.withdraw(seq, seq._end_reason)
            elif seq.state is not DECODING:  # a policy has paused it
                seq.finish_reason = seq._end_reason
                self._state.ending[seq.request_id] = seq
        self._finish([seq for seq in finished if seq.state is DECODING])

    def abort(self, request_id: int, reason: FinishReason = FinishReason.aborted) -> Sequence | None:
        """Ends a request, as `AsyncEngineCore.abort` does; with another reason, its tokens have been read."""
        self.drafting.is_read = reason is not FinishReason.aborted
        seq = super().abort(request_id, reason)
        self.drafting.is_read = False
        return seq

    def _record(self, drafts: DraftPlan, outcome: StepOutcome) -> None:
        if self._late is None:
            super()._record(drafts, outcome)

    def _free_ending(self, plan: StepPlan | None = None, late: Iterable[Sequence] = ()) -> None:
        self.drafting.is_read = True
        super()._free_ending(plan, late)
        self.drafting.is_read = False

    def _offer_read(self) -> None:
        """Offers the tokens of the step before to the cache: now they are read."""
        pool = self.block_pool
        if pool.needs_offers:
            for seq in self.running.values():
                if seq.state is DECODING or seq.state is ENDING:
                    pool.offer_known(seq, seq.num_computed - pool.num_reprefillable_tokens)

    def _may_compute_nothing(self) -> bool:
        """Returns whether a step without tokens is no error: reading those of the step before may make room.

        Then its rejected draft tokens no longer count as computed, and sequences may turn out to have ended.
        """
        decodes, step = self.drafting, self._step
        assert isinstance(step, DraftStep)
        if (decodes.base_S > decodes.computed_S)[decodes.slots].any():
            step.has_read = True
            if self._late is None:  # else the caller reads them now
                decodes.show(None)
                self.watch.read()
                self._offer_read()
                decodes.rest()
        return super()._may_compute_nothing()
