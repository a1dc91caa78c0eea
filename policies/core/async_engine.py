"""The engine with asynchronous scheduling: a step is planned before the tokens of the step before are known.

    step            n                n + 1                   n + 2
    planned from    tokens of n - 2  tokens of n - 1         tokens of n
    a sequence that ends with its token of step n
      at a limit    gets that token  gets none, holds its    is gone
                                     slot and blocks
      by a stop     gets that token  gets another token,     is gone
                                     which is discarded

The scheduler counts tokens, so it knows beforehand that a sequence reaches max_tokens, but it learns only
from the token itself that it was a stop token. This is the rule of vLLM's AsyncScheduler (vllm 0.32).

A simulator knows the end of a sequence beforehand. Then `commit` returns the sequence as finished after step
n, and the engine keeps it for step n + 1. An engine with kernels reads the tokens of step n after it has
planned step n + 1, and reports such sequences with the outcome of step n + 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from policies.core.engine import EngineCore
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.sequence import DECODING, ENDED, ENDING, WAITING, FinishReason, Sequence


class AsyncEngineCore(EngineCore):
    """An `EngineCore` that notices ends one step later. Its arguments are those of `EngineCore`.

    Sequences with branches end at once, as vLLM serves each branch as a request of its own.
    """

    def _attach(self) -> None:
        super()._attach()
        self.running_set.reads_late = True
        self._max_attempts = 1  # the tokens of the step before are read before the next attempt

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step, as `EngineCore.plan` does; complete sequences hold slots and blocks."""
        ending = self._state.ending
        if not ending:
            self._num_held = 0
            return super().plan(now)
        self._num_held = num_held = sum(seq.state is ENDING for seq in ending.values())
        if num_held == len(self._sequences):  # a step that computes nothing
            self._free_ending()
            return super().plan(now)
        plan = super().plan(now)
        if plan is None:
            self._free_ending()
            if not self._step.has_freed:
                plan = super().plan(now)
        else:
            plan.horizon = 1  # then slots and blocks become free
        return plan

    def _may_compute_nothing(self) -> bool:
        """Returns whether a step without tokens is no error of the policies.

        A step that has freed slots is no error. It sets `wake_s` to now, so that the caller reads the tokens
        of the step before, and plans again.
        """
        if self._step.has_freed:
            self.wake_s = self._now
            return True
        return bool(self._state.ending) or super()._may_compute_nothing()

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan, as `EngineCore.commit` does.

        First it frees the sequences that have ended with the step before. outcome.ended: sequences with a
        stop token in the step before, which loses its tokens of this step; sequences with branches that have
        all stopped in this step.
        """
        late = [seq for seq in outcome.ended if seq.request.branching is None]
        if not (late or self._state.ending):
            return super().commit(plan, outcome, now)
        self._check_commit(plan, outcome.iterations, now)
        self._free_ending(plan, late)
        if late:
            at_once = tuple(seq for seq in outcome.ended if seq.request.branching is not None)
            outcome = outcome._replace(ended=at_once)
        prefilled, finished = super().commit(plan, outcome, now)
        return prefilled, [*late, *finished]

    @property
    def unfinished(self) -> list[Sequence]:
        """Sequences without a complete output, in the order in which they were added."""
        return [seq for seq in self._sequences.values() if seq.finish_reason is None]

    @property
    def num_unfinished(self) -> int:
        """Number of sequences without a complete output."""
        return len(self._sequences) - len(self._state.ending)

    def find(self, request_id: int) -> Sequence | None:
        """Returns the sequence of a request without a complete output here, else None."""
        return None if request_id in self._state.ending else super().find(request_id)

    def abort(self, request_id: int, reason: FinishReason = FinishReason.aborted) -> Sequence | None:
        """Ends a request, as `EngineCore.abort` does; a complete one only frees its slot and blocks."""
        seq = super().find(request_id)
        if seq is None or request_id not in self._state.ending:
            return super().abort(request_id, reason)
        self._check_at_rest("abort")
        assert seq.finish_reason is not None
        self._state.finish(seq, seq.finish_reason)
        return None

    def _finish(self, finished: list[Sequence]) -> None:
        """Keeps sequences with a complete output for one more step."""
        if len(finished) > 1:
            finished.sort(key=lambda seq: seq.admission)
        for seq in finished:
            if seq.request.branching is not None:
                self._state.finish(seq, seq._end_reason)
            else:
                seq.finish_reason = seq._end_reason
                self.running_set.end_late(seq)

    def _free_ending(self, plan: StepPlan | None = None, late: Iterable[Sequence] = ()) -> None:
        """Frees the sequences that have ended with the step before, in the order of their admission.

        plan: the step in flight. late: those of which the engine has just learnt it.
        """
        self._num_held = 0
        ending = self._state.ending
        for seq in late:
            if seq.state is WAITING:
                raise ValueError(f"{seq!r} cannot have ended: it was not run")
            if seq.state is not ENDED:
                seq.finish_reason = FinishReason.stop
                ending[seq.request_id] = seq
        for seq in ending.values():
            if seq.request.answer_id is not None:
                self.block_pool.offer_generated(seq)  # their last tokens are read after those of the plan
        idle = () if plan is None else plan.idle
        num_planned = max(1, self._num_reserved) if plan is not None and plan.num_decodes else 0
        for seq in sorted(ending.values(), key=lambda seq: seq.admission):
            seq.num_unread = 0
            is_decoding = seq.state is DECODING and seq not in idle
            assert seq.finish_reason is not None
            if is_decoding:
                self.num_discarded += num_planned
            elif seq.state is DECODING:
                seq.stored_computed = seq.num_computed  # idle in this step: its newest token has been read
            self._state.finish(seq, seq.finish_reason, num_planned if is_decoding else 0)
        if plan is not None and plan.idle:
            plan.idle = [seq for seq in plan.idle if seq.finish_reason is None]
