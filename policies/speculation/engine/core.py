"""The serving loop of an engine that speculates.

`SpeculativeCore` is an `EngineCore` in which a decode is a pass over 1 + K tokens, of which 1 to K + 1 stay.
The executor says in `StepOutcome.accepted` how many draft tokens were right. A plan that holds for several
iterations ends with the first of them in which a sequence ends or KV blocks run out, which depends on what is
accepted: `num_iterations_of` finds it.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from policies.caching.pool import BlockPool
from policies.core.engine import EngineCore
from policies.core.limits import Bounds, RejectedError, StopAfter
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.request import Request
from policies.core.sequence import DECODING, Sequence
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
        num_tokens = decodes.size + int(np.add.reduce(decodes.drafts_S[decodes.slots]))
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
        if np.count_nonzero(is_member) < len(
            is_member
        ):  # others had ended before this step; see `AsyncEngineCore`
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
