"""Computes the number of iterations for which a plan holds: until a sequence ends or blocks run out."""

from __future__ import annotations

from bisect import bisect_right

from policies.caching.pool import BlockPool
from policies.core.decode_set import DecodeSet
from policies.core.plan import StepPlan


def cut_horizon(plan: StepPlan, decodes: DecodeSet, pool: BlockPool) -> int:
    """Returns the iterations for which a plan can be run unchanged: from 1 to the promised number."""
    horizon = plan.horizon
    if plan.num_decodes:
        first_event = decodes.iterations_to_first_event()
        if first_event < horizon:
            horizon = first_event
    for chunk in plan.chunks:  # the chunk that completes a prefill is a separate step
        horizon = min(horizon, (chunk.seq.num_uncomputed - 1) // chunk.num_tokens)
    num_free = pool.num_free_without_copy
    if plan.chunks or plan.num_decodes * (horizon // pool.block_size + 1) > num_free:  # else they suffice
        repeats = range(horizon)
        return bisect_right(repeats, num_free, key=lambda num: blocks_of_repeats(plan, num, decodes, pool))
    return horizon


def blocks_of_repeats(plan: StepPlan, num_repeats: int, decodes: DecodeSet, pool: BlockPool) -> int:
    """Counts the blocks that num_repeats further iterations of a plan need; the first has its blocks."""
    num_blocks = decodes.blocks_due_after(1, num_repeats) if plan.num_decodes else 0
    for chunk in plan.chunks:
        first = chunk.num_cached + chunk.num_tokens
        num_blocks += pool.blocks_to_grow(chunk.seq, first, first + num_repeats * chunk.num_tokens)
    return num_blocks
