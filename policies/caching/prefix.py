"""Prefix caching by block hashes, as in vLLM's automatic prefix caching.

Full blocks only. A block is offered to other sequences as soon as it is assigned to known tokens: the step
that computes it writes its KV, layer by layer, before others read it. If the sequence that was to compute it
is preempted in that step, the sequences that the step has admitted and that found the block are preempted,
too. A hit leaves at least one known token to compute. Blocks without a holder stay, and are taken for other
contents in the order in which they became free (LRU), the tail of a sequence before its head; blocks without
content go first. The same content may be stored twice, if two sequences computed it side by side. Prefixes
that clients pay for (`Prompt.num_pinned`: prompt caching of APIs) are kept for pin_s after each use, within a
share of the memory that is reserved for them. Generated tokens are offered, too, when their sequence has
ended or was preempted: the next turn of a conversation finds prompt and answer.

Memory pressure: sequences take free blocks, with contents or not; none is preempted to keep contents.
Horizon: as paged. Taking blocks evicts contents, which may shorten, never lengthen, the hit of a waiting
prompt, and leaves it as short of room as it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.caching.prefix_pool import PrefixPool
from policies.caching.settings import Caching, KvMemory, check_watermark


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixCaching(Caching):
    """Settings of a paged cache that keeps the blocks of past sequences."""

    watermark: float = 0.0
    """Share of all blocks that an admission must leave free while others run."""
    pin_s: float = 300.0
    """Time in seconds after its last use for which a pinned prefix is kept (`Prompt.num_pinned`)."""
    max_pinned_share: float = 0.0
    """Share of all blocks that is reserved for pinned prefixes; sequences cannot use it.

    A prefix that does not fit is not pinned.
    """

    def __post_init__(self) -> None:
        Caching.__post_init__(self)
        check_watermark(self.watermark)
        if not self.pin_s > 0:
            raise ValueError(f"pin_s={self.pin_s}: must be > 0 s")
        if not 0 <= self.max_pinned_share < 1:
            raise ValueError(f"max_pinned_share={self.max_pinned_share}: must be >= 0 and < 1")

    def pool(self, memory: KvMemory) -> PrefixPool:
        """Returns an empty pool."""
        return PrefixPool(
            memory.num_blocks,
            self.block_size,
            int(self.watermark * memory.num_blocks),
            pin_s=self.pin_s,
            max_pinned=int(self.max_pinned_share * memory.num_blocks),
        )
