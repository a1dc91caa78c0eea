"""Prefix caching by block hashes, as vLLM's automatic prefix caching does it.

Full blocks only. A block is offered to others from the moment at which it is handed out for known tokens: the
step that computes it writes its KV, layer by layer, before others read it. A hit leaves at least one known token
to compute. Blocks that nobody holds stay, and are taken for other contents in the order in which they became
free (LRU), the tail of a sequence before its head; blocks without content go first. The same content may be
stored twice, if two sequences computed it side by side.
Generated tokens are offered, too, when their sequence has ended or was preempted: the next turn of a
conversation finds prompt and answer.

Memory pressure: who needs blocks takes free ones, contents or not; nobody is preempted to keep contents.
Horizon: as paged. Taking blocks evicts contents, which may shorten, never lengthen, what a waiting prompt
would find.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice, repeat
from typing import ClassVar

from policies.caching.content import Places
from policies.caching.paged import BlockPool, KvMemory, check_paging
from policies.sequence import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixCaching:
    """Settings of a paged cache that keeps the blocks of the past."""

    changes_outputs: ClassVar[bool] = False

    block_size: int = 16
    """Tokens in a block."""
    watermark: float = 0.0
    """Share of all blocks that an admission must leave free while others run."""

    def __post_init__(self) -> None:
        check_paging(self.block_size, self.watermark)

    def pool(self, memory: KvMemory) -> PrefixPool:
        """An empty pool."""
        return PrefixPool(memory.num_blocks, self.block_size, int(self.watermark * memory.num_blocks))


class PrefixPool(BlockPool):
    """A block pool whose blocks have contents.

    A block is in exactly one of: `_fresh` (free, no content), `_lru` (free, with content), the ids of one or
    more sequences, or `_loose` (taken for decodes, not yet said by whom). num_free counts the first two.
    """

    def __init__(self, num_blocks: int, block_size: int, num_watermark_blocks: int = 0) -> None:
        super().__init__(num_blocks, block_size, num_watermark_blocks)
        self.num_evicted = 0
        """Blocks whose content was given up for another."""
        self._places = Places(block_size)
        self._fresh = self._free_ids  # a stack, as there
        self._lru: dict[int, None] = {}  # in the order in which they became free
        self._loose: list[int] = []
        self._block_of: dict[int, int] = {}  # key -> the block that is offered
        self._copies: dict[int, list[int]] = {}  # key -> further blocks of the same content
        self._key_of: dict[int, int] = {}  # block -> key
        self._others: dict[int, int] = {}  # block -> owners beyond the first
        self._found: tuple[Sequence | None, list[int]] = (None, [])  # the last answer of num_cached

    def num_cached(self, seq: Sequence) -> int:
        keys = self._places.keys(seq.request, seq._known - 1)
        ids = list(map(self._block_of.get, keys))
        num_found = ids.index(None) if None in ids else len(ids)
        self._found = (seq, ids[:num_found])  # type: ignore[assignment]
        return num_found * self.block_size

    def can_admit(self, seq: Sequence, num_cached: int, is_alone: bool) -> bool:
        found = self._ids_found(seq, num_cached)
        num_revived = sum(map(self._lru.__contains__, found))
        room = self.num_free if is_alone else self.num_free - self.num_watermark_blocks
        return self.blocks_for(seq._known) - len(found) + num_revived <= room

    def admit(self, seq: Sequence, num_cached: int) -> None:
        found = self._ids_found(seq, num_cached)
        lru, others = self._lru, self._others
        if found:
            num_cached_free = len(lru)
            shared = [block for block in found if lru.pop(block, 0) == 0] if lru else found
            self.num_free -= num_cached_free - len(lru)
            for block in shared:
                others[block] = others.get(block, 0) + 1
        seq._block_ids.extend(found)
        seq._kv = len(found)  # blocks of its ids that have a key
        self._found = (None, [])

    def _ids_found(self, seq: Sequence, num_cached: int) -> list[int]:
        """The blocks that the last num_cached found, which was about this sequence unless num_cached is 0."""
        if not num_cached:
            return []
        assert self._found[0] is seq
        return self._found[1]

    def grow(self, seq: Sequence, num_held: int, num_tokens: int) -> None:
        num_new = self.blocks_to_grow(seq, num_held, num_tokens)
        if num_new:
            seq._block_ids.extend(self._hand_out(num_new))
        num_present = num_tokens - seq._num_loading
        if num_present // self.block_size > seq._kv:
            self._offer(seq, num_present)

    def loaded(self, seq: Sequence) -> None:
        self._offer(seq, seq._computed)

    def take(self, num_blocks: int) -> None:
        if num_blocks:
            self._loose.extend(self._hand_out(num_blocks))

    def release(self, seq: Sequence, num_tokens: int, num_planned: int = 0) -> None:
        ids = self.block_ids(seq, num_tokens)
        num_full = (num_tokens - num_planned) // self.block_size
        if num_full > seq._kv:
            self._offer(seq, num_tokens - num_planned)
        elif num_full < seq._kv:
            self._withdraw(ids[num_full : seq._kv])
        ids.reverse()
        if self._others:
            ids = [block for block in ids if not self._is_shared(block)]
        num_contentless = 0
        key_of = self._key_of
        for block in ids:  # only the tail of a sequence lacks a key
            if block in key_of:
                break
            num_contentless += 1
        self._fresh.extend(ids[:num_contentless])
        self._lru.update(zip(islice(ids, num_contentless, None), repeat(None)))
        self.num_free += len(ids)
        seq._block_ids.clear()
        self._places.forget(self._block_of)

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        while len(seq._block_ids) < self.blocks_for(num_tokens):
            seq._block_ids.append(self._loose.pop())
        return seq._block_ids

    def check_integrity(self, held: Iterable[tuple[Sequence, int]]) -> None:
        owners: dict[int, int] = {}
        num_unnamed = 0
        for seq, num_tokens in held:
            num_unnamed += self.blocks_for(num_tokens) - len(seq._block_ids)
            for block in seq._block_ids:
                owners[block] = owners.get(block, 0) + 1
        assert num_unnamed == len(self._loose), "a block is leaked or owned twice"
        free = [*self._fresh, *self._lru]
        assert len(free) == self.num_free
        assert sorted([*free, *self._loose, *owners]) == list(range(1, self.num_blocks + 1))
        assert {block: n - 1 for block, n in owners.items() if n > 1} == self._others
        stored = [(block, key) for key, block in self._block_of.items()]
        stored += [(block, key) for key, copies in self._copies.items() for block in copies]
        assert dict(stored) == self._key_of
        assert len(stored) == len(self._key_of)
        assert set(self._lru) == set(self._key_of) & set(free)

    def _hand_out(self, num_blocks: int) -> list[int]:
        """Blocks for new contents: those without any first, then those that became free first."""
        assert num_blocks <= self.num_free
        self.num_free -= num_blocks
        fresh = self._fresh
        if num_blocks <= len(fresh):
            ids = fresh[-num_blocks:]
            del fresh[-num_blocks:]
        else:
            ids = fresh[:]
            fresh.clear()
            evicted = list(islice(self._lru, num_blocks - len(ids)))
            deque(map(self._lru.pop, evicted), maxlen=0)
            self._forget_contents(evicted)
            ids += evicted
        ids.reverse()
        return ids

    def _forget_contents(self, evicted: list[int]) -> None:
        self.num_evicted += len(evicted)
        keys = list(map(self._key_of.pop, evicted))
        if not self._copies:
            deque(map(self._block_of.pop, keys), maxlen=0)
            return
        for block, key in zip(evicted, keys, strict=True):
            copies = self._copies.get(key)
            if copies is None:
                del self._block_of[key]
                continue
            if self._block_of[key] == block:
                self._block_of[key] = copies.pop(0)
            else:
                copies.remove(block)
            if not copies:
                del self._copies[key]

    def _offer(self, seq: Sequence, num_tokens: int) -> None:
        """Give the full blocks of a sequence's first num_tokens tokens, which it has been handed, their keys."""
        first, block_of = seq._kv, self._block_of
        keys = self._places.keys(seq.request, num_tokens)[first:]
        ids = seq._block_ids[first : first + len(keys)]
        seq._kv = first + len(keys)
        self._key_of.update(zip(ids, keys, strict=True))
        if block_of.keys().isdisjoint(keys):
            block_of.update(zip(keys, ids, strict=True))
            return
        for block, key in zip(ids, keys, strict=True):
            if block_of.setdefault(key, block) != block:
                self._copies.setdefault(key, []).append(block)

    def _withdraw(self, ids: list[int]) -> None:
        """Blocks were offered for tokens that will not be computed: they have no content."""
        self._forget_contents(ids)
        self.num_evicted -= len(ids)

    def _is_shared(self, block: int) -> bool:
        """Whether a block that one owner gives up has others; counts that owner off."""
        num_others = self._others.get(block)
        if num_others is None:
            return False
        if num_others == 1:
            del self._others[block]
        else:
            self._others[block] = num_others - 1
        return True
