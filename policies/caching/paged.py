"""Paged KV cache: fixed-size blocks handed out on demand (PagedAttention, Kwon et al., SOSP 2023).

Memory pressure: `take` is called only when enough blocks are free; who must give blocks back is the
scheduling policy's choice. Horizon: free blocks only shrink between ends, so a plan that could not admit a
request cannot admit it later in the same leap.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.sequence import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class Paged:
    """Settings of the paged cache."""

    block_size: int = 16
    """Tokens in a block."""
    watermark: float = 0.0
    """Share of all blocks that an admission must leave free, so that running sequences can grow."""
    presume_cached: bool = False
    """Every full block of a prompt but its last is there already; nothing is looked up.

    For measured runs that send a few prompts over and over to an engine with prefix caching. The blocks are
    not shared: each sequence takes its own.
    """

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size}: must be >= 1 token")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark={self.watermark}: must be >= 0 and < 1 (a share of all blocks)")

    def pool(self, num_blocks: int) -> BlockPool:
        """An empty pool of num_blocks blocks."""
        return BlockPool(
            num_blocks, self.block_size, int(self.watermark * num_blocks), presume_cached=self.presume_cached
        )


class BlockPool:
    """Counts free blocks, and names them when somebody wants to know which.

    Decisions depend on counts only. Physical ids are drawn when asked for (`block_ids`): a GPU engine asks
    at every step, the simulator never does. Ids run from 1 to num_blocks; block 0 is the null block.

        num_blocks = num_free + blocks owned by sequences;  ids drawn by a sequence <= blocks it owns
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_watermark_blocks: int = 0,
        *,
        presume_cached: bool = False,
    ) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks={num_blocks}: must be >= 1")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_watermark_blocks = num_watermark_blocks
        self.num_free = num_blocks
        self._presume_cached = presume_cached
        self._free_ids = list(range(num_blocks, 0, -1))  # a stack: the last freed is the next used

    @property
    def num_used(self) -> int:
        """Blocks owned by sequences."""
        return self.num_blocks - self.num_free

    @property
    def max_tokens_per_seq(self) -> int:
        """Known tokens with which a sequence alone in the pool can still be admitted."""
        return (self.num_blocks - self.num_watermark_blocks) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def num_cached(self, seq: Sequence) -> int:
        """Tokens of a waiting sequence's prompt whose KV need not be computed: whole blocks, never all."""
        if not self._presume_cached:
            return 0
        return (seq.num_prompt_tokens - 1) // self.block_size * self.block_size

    def can_admit(self, num_tokens: int) -> bool:
        """Whether a sequence of num_tokens known tokens could get all its blocks now."""
        return self.blocks_for(num_tokens) <= self.num_free - self.num_watermark_blocks

    def take(self, num_blocks: int) -> None:
        """Hand out blocks; the caller has checked num_free."""
        assert num_blocks <= self.num_free
        self.num_free -= num_blocks

    def give_back(self, seq: Sequence, num_blocks: int) -> None:
        """Free the num_blocks blocks of a sequence, and the ids it drew."""
        self.num_free += num_blocks
        assert self.num_free <= self.num_blocks
        self._free_ids.extend(reversed(seq._block_ids))
        seq._block_ids.clear()

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        """Physical ids of the blocks that hold the first num_tokens tokens of a sequence that owns them."""
        while len(seq._block_ids) < self.blocks_for(num_tokens):
            seq._block_ids.append(self._free_ids.pop())
        return seq._block_ids
