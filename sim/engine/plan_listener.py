"""Passes the plans of a replica to a function."""

from __future__ import annotations

from collections.abc import Callable

from policies.core.plan import StepPlan
from sim.engine.attachment import Attachment


class PlanListener(Attachment):
    """Calls on_plan with every plan of a replica before its first iteration."""

    def __init__(self, on_plan: Callable[[StepPlan], None]) -> None:
        self._on_plan = on_plan

    def planned(self, plan: StepPlan | None, now: float) -> None:
        if plan is not None:
            self._on_plan(plan)
