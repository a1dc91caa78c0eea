"""A replica that speculates: it draws what is accepted, and runs a plan up to the first end that this brings.

An iteration gives each sequence the tokens of a burst at its end. Draws belong to the output positions of a
request (sim/speculation/acceptance), so a leap over iterations gives the same tokens as single steps.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from hwmodels.iterations.iteration import IterationShape
from hwmodels.speculation.leaps import Leaps
from hwmodels.speculation.model import SpeculativeModel
from policies.core.plan import StepPlan
from policies.speculation import Proposer
from policies.speculation.engine.drafts import DraftPlan
from sim.engine.iteration_times import seconds_of
from sim.engine.recorder import Recorder
from sim.engine.replica import Replica
from sim.engine.replica_pool import ReplicaPool
from sim.engine.run_context import RunContext
from sim.engine.shape import shape_of
from sim.speculation.acceptance import Acceptance
from sim.speculation.recorder import DraftRecorder
from sim.speculation.shapes import with_drafts
from sim.speculation.verdict_table import VerdictTable


class SpeculativeReplica(Replica):
    """A replica whose engine verifies draft tokens."""

    has_own_times = True

    def __init__(
        self, index: int, pool: ReplicaPool, context: RunContext, acceptance: Acceptance, proposer: Proposer
    ) -> None:
        self._acceptance, self._proposer = acceptance, proposer
        model = pool.model
        self._pass_ends = (model if isinstance(model, SpeculativeModel) else Leaps(model.seconds)).pass_ends
        Replica.__init__(self, index, pool, context)

    def _new_recorder(self, context: RunContext) -> Recorder:
        core, seed = self.core, context.seed
        self._verdicts = VerdictTable(self._acceptance, self._proposer, seed, core.max_num_seqs)
        self._draft_recorder = DraftRecorder(
            self.index,
            core,
            context.requests,
            self.pool.frontend_s,
            seed,
            self._verdicts,
            self.frontend_times,
        )
        return self._draft_recorder

    def _ends_s(
        self, plan: StepPlan, shape: IterationShape | None, num_iterations: int, start_s: float
    ) -> list[float]:
        """Returns the end times of a plan's iterations, up to the first event that the draws bring."""
        drafts, factors = plan.drafts, self._slowdown
        assert isinstance(drafts, DraftPlan)
        num_iterations = self._draw(plan, num_iterations)
        recorder, model = self._draft_recorder, self.pool.model
        by_rank = self.pool.waits_for_ranks
        is_plain = plan.adapters is None and factors == 1 and self._factors is None and not by_rank
        if drafts.are_alike and is_plain and not plan.chunks:
            num_seqs = len(drafts.seqs)
            rows = drafts.num_tokens // num_seqs
            return self._pass_ends(start_s, num_seqs, recorder.contexts, rows, drafts.next_levels)
        if num_iterations == 1:
            if self._factors is not None:
                factors *= float(self._factors.of(plan.index, 1)[0])
            one = with_drafts(shape or shape_of(plan, 0), drafts, int(recorder.pairs[0]))
            return [float(start_s + factors * seconds_of(model, plan, one, 0, by_rank))]
        shapes = shape_of(plan, 0)._replace(decode_context_tokens=recorder.contexts)
        durations_s = np.asarray(model.seconds(with_drafts(shapes, drafts, recorder.pairs)))
        if self._factors is not None:
            durations_s = self._factors.of(plan.index, num_iterations) * durations_s
        durations_s = (factors * np.broadcast_to(durations_s, num_iterations)).tolist()
        durations_s[0] += start_s
        return list(accumulate(durations_s))

    def _draw(self, plan: StepPlan, num_iterations: int) -> int:
        """Draws what a plan's iterations accept; returns how many there are up to the first event."""
        drafting, drafts = self.core.drafts, plan.drafts
        assert drafting is not None
        assert isinstance(drafts, DraftPlan)
        verdicts = self._verdicts
        accepted = verdicts.accepted(drafts, 1 if verdicts.varies else num_iterations)
        num_iterations, num_blocks = drafting.num_iterations_of(plan, accepted)
        self._draft_recorder.expect(plan, drafts, accepted[:num_iterations], num_blocks)
        return num_iterations
