"""Observer of an engine: its events in their order, with times on the engine's clock."""

from __future__ import annotations

from typing import Protocol

from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.sequence import FinishReason, Sequence
from realengine.serving.answer import Answer


class Observer(Protocol):
    """Called by the engine's thread; its arguments are live objects, and must be read at once."""

    def entered(self, seq: Sequence, now_s: float) -> None:
        """A request was added; the policies know it from now on."""

    def planned(self, plan: StepPlan, num_iterations: int, now_s: float) -> None:
        """A plan was made, and is about to be run num_iterations times."""

    def waited(self, now_s: float) -> None:
        """The policies were asked, and had nothing to compute."""

    def committed(self, outcome: StepOutcome, progress: Progress, now_s: float) -> None:
        """A plan was committed to the core."""

    def left(self, seq: Sequence, reason: FinishReason, now_s: float) -> None:
        """A sequence was removed between two plans: aborted, or found to have ended before."""

    def read(self, now_s: float) -> None:
        """The device has finished the first of the launches that were not read yet."""

    def emitted(self, answer: Answer, num_tokens: int, now_s: float) -> None:
        """num_tokens new tokens of a request are visible to the client."""
