"""A KV cache: who finds room, and what is found again. Say here what it does, and after which paper.

It sees: the sequences that ask for room, with the tokens they know and have computed, and the contents of
their prompts (request.prompt.segments). It never sees how long an answer will be, nor a clock.
It may refuse an admission (can_admit), say that KV is here already (num_cached), take blocks, and give them
back. policies/caching/pool.py lists the methods in the order of a sequence's life.
It must promise: num_free + blocks owned = num_blocks at all times, which check_integrity asserts; that
num_cached never covers all known tokens; and that whoever was refused stays refused while nothing is freed,
since leaps rely on it.

Memory pressure: an admission must leave blocks free for those that run; else the scheduling policy chooses
who goes.
Horizon: free blocks only shrink between ends.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.caching.pool import BlockPool
from policies.caching.settings import Caching, KvMemory
from policies.core.sequence import Sequence


class MyPool(BlockPool):
    """A paged cache; what its memory does differently is overridden."""

    spare_tokens: int = 0

    def can_admit(self, seq: Sequence, num_cached: int, is_alone: bool) -> bool:
        """Room for all that is known, and for spare_tokens more if others run."""
        spare = 0 if is_alone else self.spare_tokens
        return self.blocks_for(seq.num_known + spare) <= self.num_free


@dataclass(frozen=True, kw_only=True, slots=True)
class MyPolicy(Caching):
    """Paged blocks, with room to grow for whoever is admitted."""

    # Settings are the fields, with their defaults; block_size is inherited.
    spare_tokens: int = 64
    """Tokens for which there must be room beyond those known, when others run."""

    def __post_init__(self) -> None:
        Caching.__post_init__(self)
        if self.spare_tokens < 0:
            raise ValueError(f"spare_tokens={self.spare_tokens}: must be >= 0")

    def pool(self, memory: KvMemory) -> BlockPool:
        """An empty pool."""
        pool = MyPool(memory.num_blocks, self.block_size)
        pool.spare_tokens = self.spare_tokens
        return pool
