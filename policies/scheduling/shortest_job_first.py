"""Shortest job first by the predicted number of output tokens, not preemptive.

This order minimises the mean waiting time if predictions are right (Smith, 1956); SSJF (Qiu et al., 2024),
for example, applies it to LLMs. Requests with long outputs starve while shorter ones keep arriving;
max_wait_s limits that: a request that has waited that long is served before all that have not, in order of
arrival. Assumes that the service time depends on the output length: prompts are not considered. Memory
pressure: the longest predicted output is preempted. Horizon: until the first waiting request is overdue; the
order of other requests never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from fieldlimits import Ge, Unit
from policies.core.sequence import SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView
from policies.scheduling import Overdue, Scheduling


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortestJobFirst(Scheduling):
    """The shortest predicted output is admitted first, the longest is preempted first."""

    needs_predictor: ClassVar[bool] = True

    max_wait_s: Annotated[float | None, Ge(0), Unit("s"), "null for no limit"] = None
    """Seconds since its arrival after which a waiting request is served before all others; null: never."""

    _overdue: Overdue = field(init=False, default_factory=Overdue, repr=False, compare=False)

    @property
    def starvation_bound_s(self) -> float | None:
        """Equal to max_wait_s."""
        return self.max_wait_s

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (0, arrival) if overdue, else (1, predicted output tokens, arrival)."""
        return self._overdue.rank(seq, self.max_wait_s, seq.num_predicted_tokens)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Moves overdue requests to the front."""
        self._overdue.bring_forward(view, step, now)

    def on_end(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._overdue.forget(seq)
