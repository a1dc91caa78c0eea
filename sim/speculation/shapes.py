"""The shapes of iterations that verify draft tokens, for the hardware models."""

from __future__ import annotations

from typing import Any

import numpy as np

from hwmodels.exact import Num
from hwmodels.iterations.iteration import DraftWork, IterationShape
from policies.core.plan import StepPlan
from policies.speculation.engine.drafts import DraftPlan, Ints
from sim.engine.shape import shape_of


def pairs_of(drafts: DraftPlan, computed: Ints, sums: Any) -> Any:
    """Counts the query-key pairs of the draft tokens and padding rows of iterations.

    computed: computed tokens before each iteration [iterations, sequences], or before one [sequences]. sums:
    their sums over the sequences.
    """
    rows, common = drafts.num_drafts, drafts.common
    if common is not None and not drafts.padded:
        return sums * common + len(rows) * (common * (common + 3) // 2)
    own_pairs = int(np.dot(rows, rows + 3)) // 2  # with the new token, and with those before it
    padded = sum(drafts.padded.values()) if drafts.padded else 0
    return computed @ rows + (own_pairs + padded)


def first_shape(plan: StepPlan, drafts: DraftPlan) -> IterationShape:
    """Returns the shape of the first iteration of a plan."""
    num_computed = plan.num_decode_context_tokens - len(drafts.seqs)
    return with_drafts(shape_of(plan, 0), drafts, int(pairs_of(drafts, drafts.num_computed, num_computed)))


def with_drafts(shape: IterationShape, drafts: DraftPlan, pairs: Num) -> IterationShape:
    """Adds the draft tokens of a plan to a shape. pairs: see `pairs_of`."""
    num_next, num_drafted = drafts.next_counts
    work = DraftWork(
        tokens=drafts.num_tokens, pairs=pairs, seqs=num_next, steps=drafts.next_levels, drafted=num_drafted
    )
    return shape._replace(drafts=work, sampled_seqs=shape.sampled_seqs + drafts.num_tokens)
