"""The iterations that a replica is running: one plan, repeated until the boundary at which it plans again."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from hwmodels.iterations.iteration import IterationShape
from policies.core.plan import StepPlan
from sim.engine.shape import shape_of


class RunningStep:
    """A plan with iterations that end at ends_s[0], ends_s[1], ...; it ends after num_iterations, at end_s.

    Several iterations are a leap. shape: the shape of the first iteration, if the plan has prompt chunks.
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
        """Makes the step end after its first num_iterations, at least one."""
        self.num_iterations = num_iterations
        self.end_s = self.ends_s[num_iterations - 1]

    @property
    def last_start_s(self) -> float:
        """Time at which its last iteration begins, s."""
        num_iterations = self.num_iterations
        return self.ends_s[num_iterations - 2] if num_iterations > 1 else self.start_s

    def boundary_s(self, now: float) -> float:
        """Returns the end of the first iteration that ends at `now` or later, s."""
        return self.ends_s[bisect_left(self.ends_s, now)]

    def num_ended(self, now: float) -> int:
        """Returns how many of its iterations have ended by `now`."""
        return bisect_right(self.ends_s, now, hi=self.num_iterations)

    def shape_of_iteration(self, step: int) -> IterationShape:
        """Returns the shape of its iteration `step` (from 0)."""
        return shape_of(self.plan, step) if step or self.shape is None else self.shape
