"""A replica that speculates: it draws what is accepted, and runs a plan up to the first end that this brings.

An iteration gives each sequence the tokens of a burst at its end. Draws belong to the output positions of a
request (sim/speculation/acceptance), so a leap over iterations gives the same tokens as single steps.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from hwmodels.iterations.iteration import IterationShape
from hwmodels.iterations.jitter import JitterFactors
from policies.core.plan import StepPlan
from policies.speculation import Proposer
from policies.speculation.engine.core import Speculating
from policies.speculation.engine.drafts import DraftPlan
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool
from sim.engine.run_context import RunContext
from sim.speculation.acceptance import Acceptance
from sim.speculation.recorder import DraftRecorder
from sim.speculation.shapes import first_shape, shapes
from sim.speculation.verdict_table import VerdictTable
from sim.workload.streams import stream


class SpeculativeReplica(Replica):
    """A replica whose engine verifies draft tokens."""

    def __init__(
        self, index: int, pool: ReplicaPool, context: RunContext, acceptance: Acceptance, proposer: Proposer
    ) -> None:
        Replica.__init__(self, index, pool, context)
        self._verdicts = VerdictTable(acceptance, proposer, context.seed, self.core.max_num_seqs)
        self._draft_recorder = DraftRecorder(
            index, self.core, context.requests, pool.frontend_s, context.seed, self._verdicts
        )
        self.recorder = self._draft_recorder
        self._factors = None
        if pool.jitter is not None:
            self._factors = JitterFactors(pool.jitter, stream(context.seed, "jitter", index))

    def _ends_s(
        self, plan: StepPlan, shape: IterationShape | None, num_iterations: int, start_s: float
    ) -> list[float]:
        """Returns the end times of a plan's iterations, up to the first event that the draws bring."""
        core, drafts = self.core, plan.drafts
        assert isinstance(core, Speculating)
        assert isinstance(drafts, DraftPlan)
        verdicts, recorder = self._verdicts, self._draft_recorder
        accepted = verdicts.accepted(drafts, 1 if verdicts.varies else num_iterations)
        num_iterations, num_blocks = core.num_iterations_of(plan, accepted)
        recorder.accepted, recorder.num_blocks = accepted[:num_iterations], num_blocks
        factors = self._slowdown
        if num_iterations == 1:
            recorder.computed = drafts.num_computed[np.newaxis]
            if self._factors is not None:
                factors *= float(self._factors.of(plan.index, 1)[0])
            return [float(start_s + factors * self.pool.model.seconds(first_shape(plan, drafts)))]
        computed = np.empty_like(recorder.accepted)
        computed[0] = drafts.num_computed
        computed[1:] = drafts.totals[: num_iterations - 1]
        recorder.computed = computed
        durations_s = np.asarray(self.pool.model.seconds(shapes(plan, drafts, computed)))
        if self._factors is not None:
            durations_s = self._factors.of(plan.index, num_iterations) * durations_s
        durations_s = (factors * np.broadcast_to(durations_s, num_iterations)).tolist()
        durations_s[0] += start_s
        return list(accumulate(durations_s))
