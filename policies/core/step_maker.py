"""The core's side of a step: opens the builder for the policies, closes it, and creates the plan."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from policies.core.horizon import cut_horizon
from policies.core.plan import Cause, StepPlan
from policies.core.sequence import DECODING, Sequence
from policies.core.step import StepBuilder


class StepMaker(StepBuilder):
    """The builder of all steps of an engine; policies act on it between `begin` and `end`."""

    def begin(self) -> None:
        """Opens an empty step."""
        self._clear()
        self.is_open = True

    def end(self) -> StepPlan | None:
        """Closes the step and returns it as a plan; None if it computes no token.

        The horizon is cut to the first event that ends the policy's promise.
        """
        self.is_open = False
        if not self.num_tokens:
            return None
        state, decodes, pool = self._state, self._decodes, self._pool
        idle: SequenceOf[Sequence] = ()
        if self._all_decode or self._decoded:
            decoding: Iterable[Sequence] = decodes
            num_decodes, num_widening = decodes.size, decodes.num_widening
            num_context_tokens = num_widening + decodes.num_context_tokens
            if not self._all_decode:
                idle = [seq for seq in decodes if seq.request_id not in self._decoded]
                num_decodes -= len(idle)
                widening = sum(seq.growth.widens for seq in idle)
                num_widening -= widening
                num_context_tokens -= sum(seq.num_held for seq in idle) + widening
        else:
            decoding, num_decodes, num_widening, num_context_tokens = (), 0, 0, 0
        horizon = self._promise if self._promise < self._hold else self._hold
        if self._completes or idle or self._preempted or (self._chunks and pool.replans_chunks):
            horizon = 1
        if pool.awaits_answer:
            horizon = 1
        if self._admitted and state.chunk_rank is not None:  # they change the order of prefills
            horizon = 1
        plan = StepPlan(
            pool.num_iterations,
            num_decodes,
            num_context_tokens,
            num_widening,
            decoding,
            horizon,
            self._until_s,
            self._chunks,
            self._admitted,
            self.preempted if self._preempted else (),
            idle,
            self.waits_for() if len(state.sequences) > len(state.running) else None,
        )
        self._complete(plan)
        return plan

    def _complete(self, plan: StepPlan) -> None:
        """Adds what the plan has beside its sequences, and cuts its horizon to the first event."""
        self._state.complete(plan, self._decoded)
        if plan.horizon > 1:
            plan.horizon = cut_horizon(plan, self._decodes, self._pool)

    def num_readable(self, seq: Sequence, in_flight: StepPlan | None) -> int:
        """Counts the first tokens of a running sequence that are known and computed, also in this step.

        in_flight: the plan of this step, if it is complete.
        """
        num_computed = seq.num_computed
        is_decoding = seq.state is DECODING
        if in_flight is not None:
            has_decoded = is_decoding and in_flight.num_decodes > 0 and seq not in in_flight.idle
        else:
            has_decoded = self.is_open and is_decoding and self._has_decoded(seq)
        if not self._state.running_set.reads_late:
            return num_computed + has_decoded
        num_unread = num_computed > seq.stored_computed if is_decoding else seq.num_unread
        return num_computed if has_decoded else num_computed - num_unread

    @property
    def has_preempted(self) -> bool:
        """True if the step has preempted sequences, those with a complete output included."""
        return bool(self._preempted)

    @property
    def preempted(self) -> list[Sequence]:
        """Sequences that the step has preempted and that will continue, in order."""
        preempted = self._preempted
        return [seq for seq in preempted if seq.finish_reason is None] if preempted else preempted

    @property
    def has_freed(self) -> bool:
        """True if the step has preempted sequences, those with a complete output included."""
        return bool(self._preempted)

    @property
    def wake_s(self) -> float | None:
        """Time at which the policies ask to be called again if no token is computed; None: no such time."""
        return self._wake_s if self._waits else None

    def waits_for(self) -> Cause | None:
        """Returns the reason why the first waiting sequence waits; None: no sequence is waiting."""
        if not self._state.num_waiting:
            return None
        if self._lacked_blocks:
            return Cause.memory
        if self._refusal is not None:
            return self._refusal
        return self._state.cause_if_untried()
