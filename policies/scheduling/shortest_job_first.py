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

from policies.scheduling import Scheduling
from policies.scheduling.alarms import Alarms
from policies.sequence import Sequence, SequenceState
from policies.step import StepBuilder, StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class ShortestJobFirst(Scheduling):
    """The shortest predicted answer is admitted first, the longest is preempted first."""

    needs_predictor: ClassVar[bool] = True

    max_wait_s: float | None = None
    """Time since its arrival after which a waiting request goes before all others; null: never."""

    _overdue: set[int] = field(init=False, default_factory=set, repr=False, compare=False)
    _alarms: Alarms = field(init=False, default_factory=Alarms, repr=False, compare=False)

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        if self.max_wait_s is not None and not self.max_wait_s >= 0:
            raise ValueError(f"max_wait_s={self.max_wait_s}: must be >= 0 s; null for no limit")

    def rank(self, seq: Sequence) -> tuple[float, ...]:
        """(0, arrival) if it is overdue, else (1, predicted output tokens, arrival)."""
        arrival_s = seq.request.arrival_s
        if seq.request_id in self._overdue:
            return (0, arrival_s)
        if self.max_wait_s is not None:
            self._alarms.set(arrival_s + self.max_wait_s, seq)
        return (1, seq.num_predicted_tokens, arrival_s)

    def before_step(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Bring the overdue to the front."""
        for seq in self._alarms.ring(now):
            if seq.state is SequenceState.waiting:  # else it is asked for its rank when it waits again
                self._overdue.add(seq.request_id)
                step.rerank(seq)
        if view.num_waiting:
            step.hold(until_s=self._alarms.next_s)

    def on_end(self, seq: Sequence) -> None:
        """Forget it."""
        self._overdue.discard(seq.request_id)
