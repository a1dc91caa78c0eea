"""Several observers of one engine, in the place of one."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import numpy as np
from numpy.typing import NDArray

from policies.core.plan import Progress, StepOutcome, StepPlan
from policies.core.sequence import FinishReason, Sequence
from realengine.observer import Observer
from realengine.serving.answer import Answer


class Observers:
    """Passes every event on, in the order of the observers."""

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
