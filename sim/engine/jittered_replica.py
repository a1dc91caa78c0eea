"""A replica whose iterations scatter around the times of the hardware model: `latency/jitter=`."""

from __future__ import annotations

from hwmodels.iterations.iteration import IterationShape
from hwmodels.iterations.jitter import Jitter, JitterFactors
from policies.core.plan import StepPlan
from sim.engine.iteration_times import scaled_ends_s
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool
from sim.engine.run_context import RunContext
from sim.workload.streams import stream


class JitteredReplica(Replica):
    """A replica with jitter; the factor of an iteration belongs to its number in the replica."""

    has_own_times = True

    def __init__(self, index: int, pool: ReplicaPool, context: RunContext, jitter: Jitter) -> None:
        Replica.__init__(self, index, pool, context)
        self._factors = JitterFactors(jitter, stream(context.seed, "jitter", index))

    def _ends_s(
        self, plan: StepPlan, shape: IterationShape | None, num_iterations: int, start_s: float
    ) -> list[float]:
        """Returns the end time of each iteration of a plan, with the slowdown and the jitter."""
        factors = self._slowdown * self._factors.of(plan.index, num_iterations)
        scale = factors if num_iterations > 1 else float(factors[0])
        return scaled_ends_s(self.pool.model, plan, shape, num_iterations, start_s, scale)
