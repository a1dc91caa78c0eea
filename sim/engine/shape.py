"""Converts a plan of the policies to the iteration shape that the hardware models price."""

from __future__ import annotations

from hwmodels.exact import Num
from hwmodels.iterations.iteration import AdapterBatch, IterationShape, causal_pairs
from policies.core.plan import StepPlan


def shape_of(plan: StepPlan, step: Num) -> IterationShape:
    """Returns the shape of the plan's iteration `step` (from 0).

    An array of steps gives arrays where iterations differ: from one iteration to the next, a decode attends
    to one more token, and a chunk to the chunks before it.
    """
    num_decodes = num_sampled = plan.num_decodes
    context = plan.num_decode_context_tokens + plan.num_widening * step
    num_tokens = 0
    num_pairs: Num = 0
    num_context: Num = 0
    for _, num_cached, n, completes in plan.chunks:
        cached = num_cached + n * step
        num_tokens += n
        num_pairs = num_pairs + causal_pairs(n, cached)
        num_context = num_context + cached + n
        num_sampled += completes
    adapters = None if plan.adapters is None else AdapterBatch(*plan.adapters)
    return IterationShape(
        num_decodes, context, len(plan.chunks), num_tokens, num_pairs, num_context, num_sampled, adapters
    )
