"""The serving loop of an engine that speculates, and plans a step before it has read the one before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

from policies.core.async_engine import AsyncEngineCore
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.sequence import DECODING, ENDING, WAITING, FinishReason, Sequence
from policies.speculation.engine.core import Speculating
from policies.speculation.engine.drafts import DraftPlan, Ints, Speculation, check_accepted
from policies.speculation.engine.step import DraftStep


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
