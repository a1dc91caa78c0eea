"""The iterations that a replica runs: one plan, repeated until a boundary at which it is planned anew."""

from __future__ import annotations

from bisect import bisect_left

from hwmodels.iterations.iteration import IterationShape
from policies.core.plan import StepPlan
from sim.engine.shape import shape_of


class RunningStep:
    """A plan whose iterations end at ends_s[0], ends_s[1], ...; it ends after num_iterations, at end_s.

    Several iterations are a leap. shape: of the first iteration, if the plan has prompt chunks.
    """

    __slots__ = ("end_s", "ends_s", "num_iterations", "plan", "shape", "start_s")

    def __init__(
        self, plan: StepPlan, shape: IterationShape | None, start_s: float, ends_s: list[float]
    ) -> None:
        self.plan = plan
        self.shape = shape
        self.start_s = start_s
        self.ends_s = ends_s
        self.num_iterations = len(ends_s)
        self.end_s = ends_s[-1]

    def cut(self, num_iterations: int) -> None:
        """Let it end after so many of its iterations, at least one."""
        self.num_iterations = num_iterations
        self.end_s = self.ends_s[num_iterations - 1]

    @property
    def last_start_s(self) -> float:
        """When its last iteration begins."""
        num_iterations = self.num_iterations
        return self.ends_s[num_iterations - 2] if num_iterations > 1 else self.start_s

    def boundary_s(self, now: float) -> float:
        """The first end of an iteration that is not earlier than `now`."""
        return self.ends_s[bisect_left(self.ends_s, now)]

    def shape_of_iteration(self, step: int) -> IterationShape:
        """What its iteration `step` (from 0) computes."""
        return shape_of(self.plan, step) if step or self.shape is None else self.shape
