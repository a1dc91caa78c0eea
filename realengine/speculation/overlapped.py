"""The serving loop of an engine that speculates, and launches a pass before it reads the one before.

    plan 1 | launch 1 | commit 1 | plan 2 | launch 2 | read 1 | commit 2 | plan 3 | launch 3 | read 2 ...

The device knows what a pass has accepted when it runs the next one; the core learns it when the tokens are
read, after the next plan. See `policies.speculation.engine.drafting`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome, StepPlan
from policies.speculation.engine.drafts import DraftPlan
from realengine.runner.launch import Launch
from realengine.serving.answer import Answer
from realengine.speculation.engine import SpeculatingEngine


class OverlappedSpeculatingEngine(SpeculatingEngine):
    """A `SpeculatingEngine` that reads late. The device drafts. Its arguments are those of the base."""

    def __init__(self, core: EngineCore, *args: Any, **settings: Any) -> None:
        super().__init__(core, *args, **settings)
        self._unread: StepPlan | None = None  # committed; its launch is not read yet

    def _read(self, launch: Launch) -> list[Answer]:
        """Reads a launch as `Engine._read` does; tells the core what it accepted, and which sequences end."""
        plan, self._unread = self._unread, None
        assert plan is not None
        assert isinstance(plan.drafts, DraftPlan)
        answers = [self._answer_of.get(seq) for seq, _ in launch.rows[: len(plan.drafts.seqs)]]
        num_before = [len(answer.outputs[0].tokens) if answer is not None else 0 for answer in answers]
        changed = super()._read(launch)
        accepted = np.array([num for (num,) in self._accepted[: len(answers)]], np.int64)
        stopped, self._ended = self._ended, []
        for seq in stopped:
            if seq in plan.drafts.seqs:
                index = plan.drafts.seqs.index(seq)
                answer = answers[index]
                assert answer is not None
                accepted[index] = len(answer.outputs[0].tokens) - num_before[index] - 1
        for seq in self._drafts.read(plan, accepted[None], stopped):
            self._end_all(seq, "length")
        if self.observer is not None:
            self.observer.verified(plan, accepted)
        return changed

    def _outcome(self, plan: StepPlan, num_iterations: int) -> StepOutcome:
        self._unread = plan
        return StepOutcome(num_iterations)
