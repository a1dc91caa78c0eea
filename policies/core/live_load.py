"""Extends a sequence whose KV is copied from another engine while that one goes on decoding it.

The sequence was adopted with tier="live", and is loading. Its blocks are checked at once, also while a plan
is in flight, and taken between that plan and the next one, before which no other sequence takes blocks.
"""

from __future__ import annotations

from policies.core.engine import EngineCore


def has_room(core: EngineCore, request_id: int, num_computed: int, num_due_blocks: int) -> bool:
    """Returns whether there are blocks for num_computed tokens of a loading sequence.

    num_due_blocks: free blocks that iterations of the plan in flight will take, up to the next commit.
    """
    seq, pool = core.loading[request_id], core.block_pool
    needed = pool.blocks_to_grow(seq, seq.stored_computed, num_computed)
    return needed <= pool.num_free - num_due_blocks


def extend_load(core: EngineCore, request_id: int, num_known: int, num_computed: int) -> None:
    """Takes the blocks for which there was room, between commit and plan, unless the sequence has left.

    num_known, num_computed: its tokens in the other engine; num_computed of them have KV that is copied or
    being copied.
    """
    seq, pool = core.loading.get(request_id), core.block_pool
    if seq is None:
        return
    num_before = seq.stored_computed
    seq.num_loading += num_computed - num_before
    pool.grow(seq, num_before, num_computed)
    seq.stored_computed = seq.num_found = seq.num_swapped = num_computed
    seq.stored_known = num_known
