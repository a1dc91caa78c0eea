"""Observers of an engine: its events in order, with times on the engine's clock."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.sequence import FinishReason, Sequence
from realengine.serving.answer import Answer


class Observer(Protocol):
    """Receives events in the engine's thread; the arguments are live objects that must be read at once."""

    def entered(self, seq: Sequence, now_s: float) -> None:
        """Handles an added request, which the policies know from now on."""

    def planned(self, plan: StepPlan, num_iterations: int, now_s: float) -> None:
        """Handles a new plan, which is about to run num_iterations times."""

    def waited(self, now_s: float) -> None:
        """Handles a call of the policies that found no work."""

    def committed(self, outcome: StepOutcome, progress: Progress, now_s: float) -> None:
        """Handles the commit of a plan to the core."""

    def verified(self, plan: StepPlan, accepted: NDArray[np.int64]) -> None:
        """Handles the accepted draft tokens of each sequence of a plan that was committed without them.

        The counts of the next plan are right from now on.
        """

    def left(self, seq: Sequence, reason: FinishReason, now_s: float) -> None:
        """Handles the removal of a sequence between two plans: aborted, or found to have ended."""

    def read(self, now_s: float) -> None:
        """Handles the end of the oldest unread launch on the device."""

    def emitted(self, answer: Answer, num_tokens: int, now_s: float) -> None:
        """Handles num_tokens new tokens of a request, which the client can see now."""


class Observers:
    """Several observers in the place of one: passes every event on, in their order."""

    def __init__(self, observers: SequenceOf[Observer]) -> None:
        self._observers = tuple(observers)

    def entered(self, seq: Sequence, now_s: float) -> None:
        for each in self._observers:
            each.entered(seq, now_s)

    def planned(self, plan: StepPlan, num_iterations: int, now_s: float) -> None:
        for each in self._observers:
            each.planned(plan, num_iterations, now_s)

    def waited(self, now_s: float) -> None:
        for each in self._observers:
            each.waited(now_s)

    def committed(self, outcome: StepOutcome, progress: Progress, now_s: float) -> None:
        for each in self._observers:
            each.committed(outcome, progress, now_s)

    def verified(self, plan: StepPlan, accepted: NDArray[np.int64]) -> None:
        for each in self._observers:
            each.verified(plan, accepted)

    def left(self, seq: Sequence, reason: FinishReason, now_s: float) -> None:
        for each in self._observers:
            each.left(seq, reason, now_s)

    def read(self, now_s: float) -> None:
        for each in self._observers:
            each.read(now_s)

    def emitted(self, answer: Answer, num_tokens: int, now_s: float) -> None:
        for each in self._observers:
            each.emitted(answer, num_tokens, now_s)
