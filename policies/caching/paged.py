"""Paged KV cache: fixed-size blocks allocated on demand (PagedAttention, Kwon et al., SOSP 2023).

Memory pressure: blocks are taken only when enough are free; the scheduling policy chooses the sequence to
preempt. Horizon: between ends of sequences the number of free blocks only decreases, so a request that a plan
could not admit cannot be admitted while the plan is repeated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import Ge, Lt, Unit
from policies.caching.pool import BlockPool, Caching, KvMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class Paged(Caching):
    """Settings of the paged cache."""

    holds_states: ClassVar[bool] = True

    watermark: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.0
    """Share of all blocks that an admission must leave free while other sequences run."""
    presume_cached: bool = False
    """Whether every full block of a prompt except the last is assumed to be cached, without a lookup. This
    models measurements that repeat the same few prompts on an engine with prefix caching. The blocks are not
    shared: each sequence takes its own.
    """

    shares_branches: bool = True
    """Whether the branches of one request share KV blocks.

    If not, each branch has its own copies; copying takes no time.
    """

    def pool(self, memory: KvMemory) -> BlockPool:
        """Creates an empty pool."""
        pool = BlockPool(memory.num_blocks, self.block_size, int(self.watermark * memory.num_blocks))
        pool.presume_cached = self.presume_cached
        pool.shares_branches = self.shares_branches
        return pool
