"""The messages of KV events as vLLM 0.32 encodes them: a batch is an array, an event a map with its type."""

from __future__ import annotations

from typing import Any

import msgspec

Hash = int
"""Hash of a block, 64 bits."""


class Event(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """A change of what a cache holds."""


class BlockStored(Event):
    """Consecutive blocks of a prefix that a cache holds from now on.

    parent_block_hash: of the block before the first; None: there is none. token_ids: of all blocks. medium:
    GPU, CPU or STORAGE. extra_keys: of each block; None: they have none.
    """

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(Event):
    """Blocks that a cache holds no longer."""

    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    """A cache is empty, and so are the tiers below it."""


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Changes in their order. ts: time in seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None
