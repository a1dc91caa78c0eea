"""Caching policy: decides which sequences get KV blocks and which KV is reused. Describe it; name the paper.

It sees: the sequences that need blocks, with their known and computed tokens, and the contents of their
prompts (request.prompt.segments). It never sees output lengths or a clock.
It may: refuse an admission (can_admit), report KV that is cached already (num_cached), and take and free
blocks. policies/caching/pool.py lists the methods in the order in which a sequence calls them.
It must promise: num_free + blocks owned = num_blocks at all times, which check_integrity asserts; num_cached
never covers all known tokens; and a refused sequence stays refused while nothing is freed, on which leaps
rely.

Memory pressure: an admission must leave blocks free for running sequences; if there are too few, the
scheduling policy chooses the sequence to preempt.
Horizon: free blocks only decrease between ends of sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from fieldlimits import NonNegativeInt
from policies.caching.pool import BlockPool, Caching, KvMemory
from policies.core.sequence import Sequence


class MyPool(BlockPool):
    """Paged cache; methods that differ from it are overridden."""

    spare_tokens: int = 0

    def can_admit(self, seq: Sequence, num_cached: int, is_alone: bool) -> bool:
        """Returns whether the known tokens fit, and spare_tokens more if other sequences run."""
        spare = 0 if is_alone else self.spare_tokens
        return self.blocks_for(seq.num_known + spare) <= self.num_free


@dataclass(frozen=True, kw_only=True, slots=True)
class MyPolicy(Caching):
    """Paged blocks with room for the growth of each admitted sequence."""

    # Settings are the fields, with their defaults; block_size is inherited.
    spare_tokens: NonNegativeInt = 64
    """Tokens, in addition to the known ones, for which there must be room if other sequences run."""

    def pool(self, memory: KvMemory) -> BlockPool:
        """Returns an empty block pool."""
        pool = MyPool(memory.num_blocks, self.block_size)
        pool.spare_tokens = self.spare_tokens
        return pool
