"""Who watches an engine: what it did and when, in the order in which it did it. All times on its clock."""

from __future__ import annotations

from typing import Protocol

from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.sequence import FinishReason, Sequence
from realengine.serving.answer import Answer


class Observer(Protocol):
    """Called by the engine's thread; what it is shown is live, and to be read at once."""

    def entered(self, seq: Sequence, now_s: float) -> None:
        """The policies know a request from now on."""

    def planned(self, plan: StepPlan, num_iterations: int, now_s: float) -> None:
        """A plan was made, and is about to be run so many times."""

    def waited(self, now_s: float) -> None:
        """The policies were asked, and had nothing to compute."""

    def committed(self, outcome: StepOutcome, progress: Progress, now_s: float) -> None:
        """It was run, as far as the core is concerned."""

    def left(self, seq: Sequence, reason: FinishReason, now_s: float) -> None:
        """A sequence was taken out between two plans: given up, or found to have ended before."""

    def read(self, now_s: float) -> None:
        """The device has finished the first of the launches that were not read yet."""

    def emitted(self, answer: Answer, num_tokens: int, now_s: float) -> None:
        """`num_tokens` new tokens of a request are visible to the client."""
