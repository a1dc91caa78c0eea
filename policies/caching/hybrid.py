"""A cache with one block table per group of layers, for models with windows (vLLM's hybrid KV cache manager).

Prefixes are found as by `prefix`, if all groups have the KV that their attention reaches: full attention all
blocks, a window its last ones. The groups, and their rules, are in `kv_groups.py`. Memory pressure: as
`prefix`, where a sequence with a full window holds a constant number of blocks of its groups with that
window. Horizon: as `paged`, and up to the token with which a window of a sequence leaves a block behind, so
leaps are short.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import Ge, Lt, Unit
from policies.caching.block_tables import KvGroup
from policies.caching.group_pool import GroupPool
from policies.caching.pool import Caching, KvMemory


@dataclass(frozen=True, kw_only=True, slots=True)
class KvGroups(Caching):
    """Settings of a cache with KV groups."""

    holds_states: ClassVar[bool] = True

    has_groups: ClassVar[bool] = True

    enable_prefix_caching: bool = True
    """Whether later sequences find the KV of equal prefixes."""
    watermark: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.0
    """Share of all blocks that an admission must leave free while other sequences run."""

    def pool(self, memory: KvMemory) -> GroupPool:
        """Creates an empty pool."""
        return GroupPool(
            memory.num_blocks,
            self.block_size,
            int(self.watermark * memory.num_blocks),
            groups=memory.groups or (KvGroup(),),
            max_in_flight_tokens=memory.max_in_flight_tokens,
            max_model_len=memory.max_model_len,
            keeps_content=self.enable_prefix_caching,
        )
