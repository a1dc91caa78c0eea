"""Turns what a KV cache reports into events, with the messages of vLLM 0.32.

A batch of events is encoded as an array, and an event as a map with its type.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import msgspec

from experiments.serve.kv_events.block_chain import BlockChain
from policies.caching.pool import BlockPool

GPU = "GPU"
MEDIUM_OF_TIER = {"host": "CPU", "disk": "STORAGE"}
"""Names of the tiers below the GPU in events."""
GROUP = 0
"""Index of the only group of KV caches, as in vLLM for a model with one kind of layers."""
Hash = int
"""Hash of a block, 64 bits."""


class CacheEvents:
    """A `ContentListener` that collects events until they are taken.

    A cache may hold equal blocks under several names; an event is for the first one that is stored and the
    last one that is removed. chains: the blocks of the requests that an engine has, by request id. on_first:
    called with the first event after a `take`.
    """

    def __init__(self, chains: Mapping[int, BlockChain], on_first: Callable[[], None] | None = None) -> None:
        self._chains = chains
        self._on_first = on_first
        self._events: list[BlockStored | BlockRemoved | AllBlocksCleared] = []
        self._hash_of: dict[Hashable, BlockHash] = {}
        self._num_held: dict[str, Counter[int]] = {}  # names with a hash, by medium
        self._unheld: list[Hashable] = []  # names that a tier may still report in the present step

    def listen(self, pool: BlockPool) -> bool:
        """Listens to an empty pool in the place of the one before; returns false for one without contents."""
        if self._hash_of:
            self._hash_of.clear()
            self._num_held.clear()
            self._unheld.clear()
            self._add(AllBlocksCleared())
        return pool.report_to(self)

    def take(self) -> list[BlockStored | BlockRemoved | AllBlocksCleared]:
        """Returns the events since the last call."""
        for name in self._unheld:
            block = self._hash_of.get(name)
            if block is not None and not block.num_tiers:
                del self._hash_of[name]
        self._unheld.clear()
        events, self._events = self._events, []
        return events

    # What the pool reports.

    def stored(self, request_id: int, first: int, names: Sequence[Hashable]) -> None:
        chain = self._chains[request_id]
        new = []
        for number, name in enumerate(names, first):
            block = self._hash_of.get(name)
            if block is None or not block.num_tiers:
                block = self._hash_of[name] = BlockHash(chain, number)
            new.append(block)
        self._store(GPU, new)

    def removed(self, names: Sequence[Hashable]) -> None:
        self._remove(GPU, names)

    def stored_below(self, tier: str, names: Sequence[Hashable]) -> None:
        self._store(MEDIUM_OF_TIER[tier], [self._hash_of[name] for name in names])

    def removed_below(self, tier: str, names: Sequence[Hashable]) -> None:
        self._remove(MEDIUM_OF_TIER[tier], names)

    def _store(self, medium: str, blocks: list[BlockHash]) -> None:
        """Adds events of consecutive new blocks."""
        held = self._num_held.setdefault(medium, Counter())
        run: list[BlockHash] = []
        for block in blocks:
            block.num_tiers += 1
            held[block.hash] += 1
            if held[block.hash] > 1:
                continue
            if run and not block.follows(run[-1]):
                self._add(_stored(medium, run))
                run = []
            run.append(block)
        if run:
            self._add(_stored(medium, run))

    def _remove(self, medium: str, names: Sequence[Hashable]) -> None:
        held, gone = self._num_held[medium], []
        for name in names:
            block = self._hash_of[name]
            block.num_tiers -= 1
            if not block.num_tiers:
                self._unheld.append(name)
            held[block.hash] -= 1
            if not held[block.hash]:
                del held[block.hash]
                gone.append(block.hash)
        if gone:
            self._add(BlockRemoved(gone, medium, GROUP))

    def _add(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if not self._events and self._on_first is not None:
            self._on_first()
        self._events.append(event)


class BlockHash:
    """A block of a cache: its hash and what an event says about it. num_tiers: memory tiers that have it."""

    __slots__ = ("_extra", "_lora", "hash", "num_tiers", "parent", "tokens")

    def __init__(self, chain: BlockChain, number: int) -> None:
        self.hash = chain.external_hash(number)
        self.parent = chain.external_hash(number - 1) if number else None
        self.tokens = array("I", chain.tokens(number, number + 1))  # a fourth of a list's memory
        self.num_tiers = 0
        self._lora = chain.lora, chain.lora_number
        self._extra = tuple(key[1] for key in chain.extra_keys(number)) or None

    def follows(self, other: BlockHash) -> bool:
        """Returns whether this is the block after another one."""
        return self.parent == other.hash

    @property
    def lora(self) -> tuple[str | None, int | None]:
        """Name and number of the LoRA adapter."""
        return self._lora

    @property
    def extra(self) -> tuple[str, ...] | None:
        """Extra keys of the hash, without their sources."""
        return self._extra


def _stored(medium: str, run: list[BlockHash]) -> BlockStored:
    """Returns the event of consecutive blocks."""
    name, number = run[0].lora
    extra_keys = [block.extra for block in run]
    return BlockStored(
        [block.hash for block in run],
        run[0].parent,
        [token for block in run for token in block.tokens],
        len(run[0].tokens),
        number,
        medium,
        name,
        extra_keys if any(extra_keys) else None,
        GROUP,
    )


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
