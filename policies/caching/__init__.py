"""Where KV lives: allocators, prefix reuse, eviction, tiers. One policy a file.

Settings (`Caching`) make pools. Every pool is a `policies.caching.paged.BlockPool`: it counts blocks, and
overrides what its idea changes. Decisions depend on counts only; physical ids are drawn when asked for.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

from policies.caching.paged import BlockPool, KvMemory


class Caching(Protocol):
    """Settings of a cache."""

    changes_outputs: ClassVar[bool]
    """Whether the model's answers change: KV is dropped that attention would have read."""

    @property
    def block_size(self) -> int:
        """Tokens in a block."""

    def pool(self, memory: KvMemory) -> BlockPool:
        """An empty pool. Raises ValueError where settings and memory do not go together."""
