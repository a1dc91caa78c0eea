"""The passes of a replica that speculates: what they accept, how long they take, and their records.

An iteration gives each sequence the tokens of a burst at its end. Draws belong to the output positions of a
request (sim/speculation/acceptance), so a leap over iterations gives the same tokens as single steps. A plan
runs up to the first end that its draws bring.
"""

from __future__ import annotations

from itertools import accumulate

import numpy as np

from hwmodels.iterations.iteration import IterationModel, IterationShape
from hwmodels.iterations.jitter import JitterFactors
from hwmodels.speculation.model import Leaps, SpeculativeModel
from policies.core.engine import EngineCore
from policies.core.plan import StepOutcome, StepPlan
from policies.speculation import Proposer
from policies.speculation.engine.drafting import drafts_of
from sim.engine.iteration_times import RunningStep, seconds_of, shape_of
from sim.speculation.acceptance import Acceptance
from sim.speculation.log import DraftLog, pairs_of, with_drafts
from sim.speculation.verdict_table import VerdictTable


class Passes:
    """Draws, prices and records the passes of one replica."""

    def __init__(
        self, acceptance: Acceptance, proposer: Proposer, model: IterationModel, max_num_seqs: int, seed: int
    ) -> None:
        self._verdicts = VerdictTable(acceptance, proposer, seed, max_num_seqs)
        self._model = model
        self._pass_ends = (model if isinstance(model, SpeculativeModel) else Leaps(model.seconds)).pass_ends
        self._contexts: list[int] = []  # context tokens of all decodes, by iteration of the running step

    def ends_s(
        self,
        core: EngineCore,
        plan: StepPlan,
        shape: IterationShape | None,
        num_iterations: int,
        start_s: float,
        slowdown: float,
        factors: JitterFactors | None,
        by_rank: bool,
    ) -> list[float]:
        """Returns the end times of a plan's iterations, up to the first event that the draws bring.

        by_rank: whether the ranks of data-parallel attention wait for the slowest; other arguments as for
        `Replica`.
        """
        drafts, verdicts = drafts_of(plan), self._verdicts
        num_seqs = len(drafts.seqs)
        assert core.drafts is not None
        accepted = verdicts.accepted(drafts, 1 if verdicts.varies else num_iterations)
        num_iterations = core.drafts.num_iterations_of(plan, accepted)[0]
        contexts = [plan.num_decode_context_tokens]
        if num_iterations > 1:
            contexts = list(accumulate(drafts.sums[: num_iterations - 1].tolist(), initial=contexts[0]))
        self._contexts = contexts
        is_plain = plan.adapters is None and slowdown == 1 and factors is None and not by_rank
        if drafts.are_alike and is_plain and not plan.chunks:
            rows = drafts.num_tokens // num_seqs
            return self._pass_ends(start_s, num_seqs, contexts, rows, drafts.next_levels)
        pairs = pairs_of(drafts, contexts)
        if num_iterations == 1:
            if factors is not None:
                slowdown *= float(factors.of(plan.index, 1)[0])
            one = with_drafts(shape or shape_of(plan, 0), drafts, pairs[0])
            return [float(start_s + slowdown * seconds_of(self._model, plan, one, 0, by_rank))]
        shapes = shape_of(plan, 0)._replace(decode_context_tokens=np.array(contexts))
        durations_s = np.asarray(self._model.seconds(with_drafts(shapes, drafts, np.array(pairs))))
        if factors is not None:
            durations_s = factors.of(plan.index, num_iterations) * durations_s
        times_s = (slowdown * np.broadcast_to(durations_s, num_iterations)).tolist()
        times_s[0] += start_s
        return list(accumulate(times_s))

    def ran(self, core: EngineCore, step: RunningStep, log: DraftLog) -> StepOutcome:
        """Records iterations that have run; returns the outcome for the core, which commits them next."""
        plan, num_iterations, verdicts = step.plan, step.num_iterations, self._verdicts
        drafts = drafts_of(plan)
        assert core.drafts is not None
        assert drafts.accepted is not None
        proposed = verdicts.proposed(drafts, drafts.accepted[num_iterations - 1])
        log.add(
            drafts,
            self._contexts[:num_iterations],
            num_proposed=None if proposed is None else int(proposed.sum()),
            ended=core.ending.values(),
        )
        core.drafts.take_blocks_of(plan, num_iterations)
        verdicts.ran(drafts, num_iterations)
        return StepOutcome(num_iterations, proposed=proposed)
