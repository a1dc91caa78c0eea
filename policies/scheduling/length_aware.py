"""Length-aware order of prefills: by the tokens that remain to compute, short first or long first.

Prompt lengths are known, so no predictor is needed. Short first: the fewest uncomputed tokens are first, both
among waiting sequences and among those in prefill, which a chunked batching policy serves in this order
(`StepView.prefilling`). A short prompt that arrives during the prefill of a long one need not wait for its
chunks if the batching policy starts several prompts. Long first: the reverse, so that long prompts start
early and short ones fill the rest of the budget. Assumes that prefill time grows with tokens. Prompts of the
other kind starve while preferred ones keep arriving; max_wait_s limits that for waiting requests, as in
shortest_job_first. Memory pressure: the last in this order by prompt length is preempted. Horizon: with
several sequences in prefill the order of short first does not change, as the first only gets shorter; long
first decides every iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from fieldlimits import Ge, Unit
from policies.core.sequence import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.scheduling import Overdue, Scheduling


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthAware(Scheduling):
    """Orders prompts by their uncomputed tokens."""

    long_first: bool = False
    """Whether the most uncomputed tokens are first; else the fewest."""
    max_wait_s: Annotated[float | None, Ge(0), Unit("s"), "null for no limit"] = None
    """Seconds since its arrival after which a waiting request is served before all others; null: never."""

    _overdue: Overdue = field(init=False, default_factory=Overdue, repr=False, compare=False)

    @property
    def starvation_bound_s(self) -> float | None:
        """Equal to max_wait_s."""
        return self.max_wait_s

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (0, arrival) if overdue, else (1, known tokens or minus these, arrival)."""
        return self._overdue.rank(seq, self.max_wait_s, -seq.num_known if self.long_first else seq.num_known)

    def chunk_rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (uncomputed tokens or minus these, arrival)."""
        num_left = seq.num_uncomputed
        return (-num_left if self.long_first else num_left, seq.request.arrival_s)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Moves overdue requests to the front."""
        self._overdue.bring_forward(view, step, now)
        if self.long_first and len(view.prefilling) > 1:
            step.hold(1)

    def on_end(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._overdue.forget(seq)
