"""Shortest job first by the predicted number of output tokens, not preemptive.

This order minimises mean waiting time if predictions are right (Smith, 1956); among others SSJF (Qiu et al.,
2024) serves LLMs this way. Long answers starve while shorter ones keep coming; max_wait_s bounds that: a
request that has waited that long goes before all that have not, in order of arrival, and keeps that place.
Assumes that the service time depends on the answer's length: prompts are not considered.
Memory pressure: the longest predicted answer is preempted. Horizon: the order of requests that are not
overdue never changes; until the first waiting request is overdue.
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
        """The bound is max_wait_s."""
        return self.max_wait_s

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Sort key (0, arrival) if it is overdue, else (1, predicted output tokens, arrival)."""
        return self._overdue.rank(seq, self.max_wait_s, seq.num_predicted_tokens)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Moves overdue requests to the front."""
        self._overdue.bring_forward(view, step, now)

    def on_end(self, seq: SequenceView) -> None:
        """Forgets a sequence that has ended."""
        self._overdue.forget(seq)
