"""The engine of static batches that end as a whole: members hold slot, KV and output until the last one ends.

    member    decodes ......... ends            batch ends
    state     decoding          ending          ended: slot and blocks are free, `commit` returns it

A member whose memory is needed earlier is preempted as others are: if it has ended, only its slot and blocks
are freed, and its output is still complete with the batch. A member cannot be aborted once it runs, as a
`generate` loop cannot drop one: `find` does not return it.
"""

from __future__ import annotations

from collections.abc import Collection

from policies.core.engine import EngineCore
from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.sequence import ENDED, WAITING, Sequence


class BatchEngineCore(EngineCore):
    """An `EngineCore` in which the outputs of a batch are complete together. Arguments as of `EngineCore`.

    Sequences with branches end at once.
    """

    def _attach(self) -> None:
        super()._attach()
        self._complete: list[Sequence] = []  # outputs that are held back, in the order in which they ended
        self._due: list[Sequence] = []  # those of batches that have ended without a commit

    def plan(self, now: float) -> StepPlan | None:
        """Returns the next step, as `EngineCore.plan` does; complete members hold slots and blocks."""
        self._num_held = len(self._state.ending)
        plan = super().plan(now)
        if plan is None and self._state.ending:  # the last members were preempted: the batch is over
            self._end_batch()
            plan = super().plan(now)
        return plan

    def commit(self, plan: StepPlan, outcome: StepOutcome, now: float) -> Progress:
        """Applies the outcome of a plan; returns complete sequences when their batch has ended."""
        prefilled, finished = super().commit(plan, outcome, now)
        if len(self._state.ending) == len(self.running):
            self._end_batch()
        finished = [*self._due, *finished]
        self._due = []
        return prefilled, finished

    @property
    def unfinished(self) -> Collection[Sequence]:
        """Sequences whose output has not been returned."""
        freed = [seq for seq in (*self._due, *self._complete) if seq.state is ENDED]
        return [*self._sequences.values(), *freed]

    @property
    def num_unfinished(self) -> int:
        """Number of sequences whose output has not been returned."""
        return len(self.unfinished)

    def find(self, request_id: int) -> Sequence | None:
        """Returns the waiting sequence of a request; None if it runs or has ended."""
        seq = super().find(request_id)
        return seq if seq is not None and seq.state is WAITING else None

    def _may_compute_nothing(self) -> bool:
        """Returns whether a step without tokens is no error of the policies: the batch may be over."""
        return bool(self._state.ending) or super()._may_compute_nothing()

    def _finish(self, finished: list[Sequence]) -> None:
        """Holds back the sequences that have ended, except those with branches."""
        finished.sort(key=lambda seq: seq.admission)
        held = [seq for seq in finished if seq.request.branching is None]
        for seq in finished:
            if seq.request.branching is None:
                seq.finish_reason = seq._end_reason
                self.running_set.hold(seq)
            else:
                self._state.finish(seq, seq._end_reason)
        self._complete += held
        finished[:] = [seq for seq in finished if seq.request.branching is not None]

    def _end_batch(self) -> None:
        """Frees the members of a batch that has ended; the next commit returns them."""
        for seq in list(self._state.ending.values()):
            assert seq.finish_reason is not None
            self._state.finish(seq, seq.finish_reason)
        self._num_held = 0
        self._due += self._complete
        self._complete = []
