"""An engine that looks for new requests only at every n-th iteration of decodes (scheduler_recv_interval).

SGLang's scheduler saves host time in this way (`--scheduler-recv-interval`): it looks after every iteration
with prompt tokens and while it is idle, but only after every n-th iteration that decodes. With n = 30 and
decodes of 20 ms, a request waits 0.3 s on average before the scheduler knows it.

SGLang begins to count anew after each look; here the engine looks at the multiples of n of its iterations.
The distribution of the wait is the same for requests that arrive at random.
"""

from __future__ import annotations

from collections.abc import Callable

from sim.engine.intake import Intake, Pending
from sim.engine.running_step import RunningStep


class PolledIntake(Intake):
    """The pending requests of a replica that looks for them at every `interval`-th iteration of decodes.

    num_iterations: returns the number of iterations that the engine has committed.
    """

    __slots__ = ("_interval", "_num_iterations")

    def __init__(
        self,
        plans_ahead: bool,
        on_enter: Callable[[Pending], None],
        interval: int,
        num_iterations: Callable[[], int],
    ) -> None:
        super().__init__(plans_ahead, on_enter)
        self._interval, self._num_iterations = interval, num_iterations

    def enter_during(self, step: RunningStep) -> None:
        """Enters the requests that are known by the end of a step, if the engine looks then."""
        if self._num_until_look(step, step.num_iterations) == step.num_iterations:
            super().enter_during(step)

    def enter_at(self, now: float, is_idle: bool) -> None:
        """Enters the requests that are known between two steps, if the engine is idle or looks then."""
        if is_idle or self._num_iterations() % self._interval == 0:
            super().enter_at(now, is_idle)

    def num_iterations_before(self, step: RunningStep) -> int:
        """Returns the number of iterations until a plan includes the first pending request."""
        return self._num_until_look(step, super().num_iterations_before(step))

    def _num_until_look(self, step: RunningStep, num_iterations: int) -> int:
        """Returns after how many iterations of a step, at least num_iterations, the engine looks."""
        if step.plan.chunks:
            return num_iterations
        return num_iterations + -(self._num_iterations() + num_iterations) % self._interval
