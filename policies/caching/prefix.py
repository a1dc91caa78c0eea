"""Prefix caching by block hashes, as in vLLM's automatic prefix caching.

Only full blocks are cached. A block is offered to other sequences as soon as it is assigned to known tokens:
the step that computes it writes its KV, layer by layer, before other sequences read it. If the sequence that
computes it is preempted in that step, the sequences that the step has admitted with a hit on the block are
preempted, too. After a hit at least one known token remains to be computed. Free blocks keep their content
and are evicted in the order in which they became free (LRU), the last block of a sequence first; free blocks
without content are taken before. The same content may be stored twice if two sequences compute it at the same
time. Prefixes that clients pay for (`Prompt.num_pinned`: prompt caching of APIs) are kept for pin_s seconds
after each use, within a reserved share of the memory. Output tokens with a content id are offered as soon as
they fill a block, too (policies/caching/answers.py), so that a sequence that was preempted has a hit on what
another one with the same answer has generated since; others when their sequence has ended or was preempted.

Memory pressure: sequences take free blocks, with content or without; no sequence is preempted to keep
content. Horizon: as paged. Taking blocks evicts content, which may shorten the hit of a waiting prompt, never
lengthen it, so that a prompt without room remains without room.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import Ge, Gt, Lt, Unit
from policies.caching.prefix_pool import PrefixPool
from policies.caching.settings import Caching, KvMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixCaching(Caching):
    """Settings of a paged cache that keeps the blocks of past sequences."""

    holds_states: ClassVar[bool] = True
    finds_prefixes: ClassVar[bool] = True

    watermark: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.0
    """Share of all blocks that an admission must leave free while other sequences run."""
    pin_s: Annotated[float, Gt(0), Unit("s")] = 300.0
    """Seconds for which a pinned prefix is kept after its last use (`Prompt.num_pinned`)."""
    max_pinned_share: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.0
    """Share of all blocks that is reserved for pinned prefixes; sequences cannot use it.

    A prefix that does not fit is not pinned.
    """

    def pool(self, memory: KvMemory) -> PrefixPool:
        """Creates an empty pool."""
        return PrefixPool(
            memory.num_blocks,
            self.block_size,
            int(self.watermark * memory.num_blocks),
            pin_s=self.pin_s,
            max_pinned=int(self.max_pinned_share * memory.num_blocks),
        )
