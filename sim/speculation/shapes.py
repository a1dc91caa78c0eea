"""The shapes of iterations that verify draft tokens, for the hardware models."""

from __future__ import annotations

import numpy as np

from hwmodels.exact import Num
from hwmodels.iterations.iteration import DraftWork, IterationShape
from policies.core.plan import StepPlan
from policies.speculation.engine.drafts import DraftPlan, Ints
from sim.engine.shape import shape_of


def first_shape(plan: StepPlan, drafts: DraftPlan) -> IterationShape:
    """Returns the shape of the first iteration of a plan."""
    return _with_drafts(shape_of(plan, 0), drafts, int(np.dot(drafts.num_drafts, drafts.num_computed)))


def shapes(plan: StepPlan, drafts: DraftPlan, computed: Ints) -> IterationShape:
    """Returns the shapes of the iterations of a plan without prompt chunks, as arrays.

    computed: computed tokens before each iteration [iterations, sequences].
    """
    num_seqs = len(drafts.seqs)
    shape = shape_of(plan, 0)._replace(decode_context_tokens=np.add.reduce(computed, axis=1) + num_seqs)
    return _with_drafts(shape, drafts, computed @ drafts.num_drafts)


def _with_drafts(shape: IterationShape, drafts: DraftPlan, pairs: Num) -> IterationShape:
    """Adds the draft tokens to a shape; pairs: draft tokens times computed tokens, summed over sequences."""
    rows = drafts.num_drafts
    own_pairs = int(np.dot(rows, rows + 3)) // 2  # with the new token, and with those before it
    padded = sum(drafts.padded.values()) if drafts.padded else 0
    num_next = drafts.next_drafts
    work = DraftWork(
        tokens=drafts.num_tokens,
        pairs=pairs + own_pairs + padded,
        seqs=int(np.count_nonzero(num_next)),
        steps=drafts.next_levels,
        drafted=int(np.add.reduce(num_next)),
    )
    return shape._replace(drafts=work, sampled_seqs=shape.sampled_seqs + drafts.num_tokens)
