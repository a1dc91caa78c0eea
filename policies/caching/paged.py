"""Paged KV cache: fixed-size blocks handed out on demand (PagedAttention, Kwon et al., SOSP 2023).

Memory pressure: blocks are taken only when enough are free; the scheduling policy chooses which sequence is
preempted. Horizon: free blocks only shrink between ends, so a plan that could not admit a request cannot
admit it later in the same leap.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.caching.pool import BlockPool
from policies.caching.settings import Caching, KvMemory, check_watermark


@dataclass(frozen=True, kw_only=True, slots=True)
class Paged(Caching):
    """Settings of the paged cache."""

    watermark: float = 0.0
    """Share of all blocks that an admission must leave free while others run, so that they can grow."""
    presume_cached: bool = False
    """Whether every full block of a prompt except its last counts as cached; nothing is looked up.

    For measured runs that send a few prompts over and over to an engine with prefix caching. The blocks are
    not shared: each sequence takes its own.
    """

    shares_branches: bool = True
    """Whether branches of one request share KV blocks.

    If not, each has copies, whose making costs nothing.
    """

    def __post_init__(self) -> None:
        Caching.__post_init__(self)
        check_watermark(self.watermark)

    def pool(self, memory: KvMemory) -> BlockPool:
        """Returns an empty pool."""
        pool = BlockPool(memory.num_blocks, self.block_size, int(self.watermark * memory.num_blocks))
        pool.presume_cached = self.presume_cached
        pool.shares_branches = self.shares_branches
        return pool
