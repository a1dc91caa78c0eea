"""The shapes of iterations that verify draft tokens, for the hardware models."""

from __future__ import annotations

import numpy as np

from hwmodels.exact import Num
from hwmodels.iterations.iteration import DraftWork, IterationShape
from policies.core.plan import StepPlan
from policies.speculation.engine.drafts import DraftPlan
from sim.engine.iteration_times import shape_of


def pairs_of(drafts: DraftPlan, contexts: list[int]) -> list[int]:
    """Counts the query-key pairs of the draft tokens and padding rows of each iteration.

    contexts: tokens that all decodes attend to in each.
    """
    rows, common, num_seqs = drafts.num_drafts, drafts.common, len(drafts.seqs)
    if common is not None and not drafts.padded:
        own_pairs = num_seqs * (common * (common + 3) // 2)
        return [(context - num_seqs) * common + own_pairs for context in contexts]
    own_pairs = int(np.dot(rows, rows + 3)) // 2  # with the new token, and with those before it
    own_pairs += sum(drafts.padded.values())
    computed = [drafts.num_computed, *drafts.totals[: len(contexts) - 1]]
    return [int(np.dot(each, rows)) + own_pairs for each in computed]


def first_shape(plan: StepPlan, drafts: DraftPlan) -> IterationShape:
    """Returns the shape of the first iteration of a plan."""
    return with_drafts(shape_of(plan, 0), drafts, pairs_of(drafts, [plan.num_decode_context_tokens])[0])


def with_drafts(shape: IterationShape, drafts: DraftPlan, pairs: Num) -> IterationShape:
    """Adds the draft tokens of a plan to a shape. pairs: see `pairs_of`."""
    num_next, num_drafted = drafts.next_counts
    work = DraftWork(
        tokens=drafts.num_tokens, pairs=pairs, seqs=num_next, steps=drafts.next_levels, drafted=num_drafted
    )
    return shape._replace(drafts=work, sampled_seqs=shape.sampled_seqs + drafts.num_tokens)
