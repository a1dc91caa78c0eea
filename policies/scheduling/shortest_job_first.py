"""Shortest job first by the predicted number of output tokens, not preemptive.

The order that minimises mean waiting time if predictions are right (Smith, 1956); among others SSJF (Qiu et
al., 2024) serves LLMs this way. Long answers starve while shorter ones keep coming; max_wait_s bounds that: a
request that has waited for so long goes before all that have not, in order of arrival, and keeps that place.
Assumes that an answer's length says how long it is under way: prompts are not looked at.
Memory pressure: the longest predicted goes. Horizon: among those in time the order never changes; until the
first of the waiting is overdue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from policies.core.sequence_view import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.scheduling import Scheduling
from policies.scheduling.overdue import Overdue, check_max_wait_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortestJobFirst(Scheduling):
    """The shortest predicted answer is admitted first, the longest is preempted first."""

    needs_predictor: ClassVar[bool] = True

    max_wait_s: float | None = None
    """Time since its arrival after which a waiting request goes before all others; null: never."""

    _overdue: Overdue = field(init=False, default_factory=Overdue, repr=False, compare=False)

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        check_max_wait_s(self.max_wait_s)

    @property
    def starvation_bound_s(self) -> float | None:
        """max_wait_s."""
        return self.max_wait_s

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """(0, arrival) if it is overdue, else (1, predicted output tokens, arrival)."""
        return self._overdue.rank(seq, self.max_wait_s, seq.num_predicted_tokens)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Bring the overdue to the front."""
        self._overdue.bring_forward(view, step, now)

    def on_end(self, seq: SequenceView) -> None:
        """Forget it."""
        self._overdue.forget(seq)
