"""Iterations under way in a replica."""

from __future__ import annotations

from dataclasses import dataclass

from hwmodels.iterations.iteration import IterationShape
from policies.core.plan import StepPlan
from sim.engine.shape import shape_of


@dataclass(slots=True, eq=False)
class Flight:
    """A plan under way: iterations end at ends_s[0], ends_s[1], ...; it is left after num_iterations.

    shape: of its first iteration, if it has prompt chunks.
    """

    plan: StepPlan
    shape: IterationShape | None
    start_s: float
    ends_s: list[float]
    num_iterations: int
    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_tokens_held: int

    def shape_of_iteration(self, step: int) -> IterationShape:
        """What its iteration `step` (from 0) computes."""
        return shape_of(self.plan, step) if step or self.shape is None else self.shape
