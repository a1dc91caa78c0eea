"""Radix caching, like SGLang's RadixAttention: a radix tree of all past KV, with token-level hits.

A sequence locks the path of its hit and inserts its computed tokens: each chunk when it is done, and the
output, in its own node, when the sequence ends. A preempted sequence inserts nothing more. If another
sequence has already inserted the same tokens, the sequence uses those and frees its own. Unlocked leaves are
evicted as a whole, in the order of an eviction policy.

Memory pressure: leaves are evicted for new tokens, once for all prompts of a step, so that no prompt loses
tokens found by a lookup; locked nodes are kept. A policy may evict ahead (`StepBuilder.evict_ahead`).
Horizon: as paged; steps with prompt chunks hold for one iteration, because inserting them may free memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import Ge, Lt, OneOf, Unit
from policies.caching.content import ContentListener, all_segments, of_rank, prompt_segments
from policies.caching.eviction import Belady, Eviction, Fifo, Lfu, Lru, Priority, S3Fifo, SizeAware, TwoQ
from policies.caching.pool import BlockPool, Caching, KvMemory
from policies.caching.radix_tree import Lookup, Node, RadixTree, Segments
from policies.core.request import Request
from policies.core.sequence import WAITING, Sequence

EVICTIONS: dict[str, type[Eviction]] = {
    "lru": Lru,
    "lfu": Lfu,
    "fifo": Fifo,
    "size_aware": SizeAware,
    "two_q": TwoQ,
    "s3_fifo": S3Fifo,
    "priority": Priority,
    "belady": Belady,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Radix(Caching):
    """Settings of the radix cache."""

    holds_states: ClassVar[bool] = True
    finds_prefixes: ClassVar[bool] = True

    block_size: int = 1
    """Tokens per block, and the granularity of reuse (SGLang's page size)."""
    watermark: Annotated[float, Ge(0), Lt(1), Unit("share")] = 0.0
    """Share of all blocks that an admission must leave free while other sequences run."""
    eviction: Annotated[str, OneOf(EVICTIONS)] = "lru"
    """Eviction order of leaves: lru, lfu, fifo, size_aware, two_q, s3_fifo, priority; belady (offline)."""

    @property
    def needs_future(self) -> bool:
        """True if the cache needs the future requests, which are unknown to engines."""
        return EVICTIONS[self.eviction].is_offline

    def pool(self, memory: KvMemory) -> RadixPool:
        """Creates an empty pool."""
        return RadixPool(memory, self.block_size, self.watermark, EVICTIONS[self.eviction]())


class Holding:
    """The KV of a sequence: the tokens up to the end of a locked node, and its own blocks after them."""

    __slots__ = ("has_inserted", "ids", "lookup", "node", "num_in_tree", "segments")

    def __init__(self, segments: Segments, node: Node) -> None:
        self.segments = segments
        self.node = node  # locked; while the sequence waits: result of the last lookup
        self.lookup: Lookup | None = None  # while the sequence waits
        self.has_inserted = False  # whether it has inserted tokens since its admission
        self.num_in_tree = 0
        self.ids: list[int] = []  # ids of its own blocks, as far as assigned


class RadixPool(BlockPool):
    """A block pool with a radix tree.

    num_blocks = unused + blocks of the tree + blocks of sequences; num_free = unused + evictable.
    """

    def __init__(self, memory: KvMemory, block_size: int, watermark: float, eviction: Eviction) -> None:
        super().__init__(memory.num_blocks, block_size, int(watermark * memory.num_blocks))
        self.num_evicted = 0
        """Number of blocks with content that was evicted."""
        self._num_unused = memory.num_blocks  # negative until the contents for a step's prompts are evicted
        self._num_grown = [0, 0, 0]  # prompts of a step so far: chunks, their tokens, their blocks
        self._is_lru = isinstance(eviction, Lru)
        self._listener: ContentListener | None = None
        self._future = memory.future
        self._tree = RadixTree(
            page_size=block_size, eviction=eviction, future=memory.future, on_evict=self._on_evict
        )

    def report_to(self, listener: ContentListener) -> bool:
        self._listener = listener
        return True

    @property
    def replans_chunks(self) -> bool:
        return True

    def num_cached(self, seq: Sequence) -> int:
        if self._future is not None:
            self._future.begin(seq.request_id)
        held = self._held(seq)
        lookup, max_tokens = held.lookup, self._most(seq, seq.stored_known - 1)
        if lookup is None or lookup.max_tokens != max_tokens:
            held.lookup = lookup = self._tree.lookup(held.segments, max_tokens)
        num_cached, held.node = self._tree.match_again(lookup)
        if num_cached and self.drops_last_block:
            shorter = self._tree.lookup(held.segments, num_cached - 1)
            num_cached, held.node = self._tree.match_again(shorter)
        return num_cached

    @property
    def num_free_without_content(self) -> int:
        return self._num_unused

    def peek(self, request: Request) -> int:
        return self._tree.peek(tuple(prompt_segments(request)), request.prompt.num_tokens - 1)

    def can_admit(self, seq: Sequence, num_cached: int, is_alone: bool) -> bool:
        need = self.blocks_to_admit(seq) - num_cached // self.block_size
        if num_cached:
            need += self.num_free_found(seq, num_cached)
        return need <= (self.num_free if is_alone else self.num_free - self.num_watermark_blocks)

    def num_free_found(self, seq: Sequence, num_cached: int) -> int:
        node, num_tokens = self._held(seq).node, 0
        while num_cached and node.parent is not None and not node.lock_count:  # locks extend to the root
            num_tokens += node.num_tokens
            node = node.parent
        return num_tokens // self.block_size

    def admit(self, seq: Sequence, num_cached: int) -> None:
        held = self._held(seq)
        if not num_cached:
            held.node = self._tree.root
        held.lookup = None
        held.num_in_tree = num_cached
        self._tree.lock(held.node)
        self._count()

    def grow(self, seq: Sequence, num_held: int, num_tokens: int) -> None:
        num_blocks = self.blocks_to_grow(seq, num_held, num_tokens)
        assert num_blocks <= self.num_free
        self._num_unused -= num_blocks
        self.num_free -= num_blocks
        for place, num in enumerate((1, num_tokens - num_held, num_blocks)):
            self._num_grown[place] += num

    def settle(self) -> None:
        """Evicts for all prompts of a step at once, so that no prompt loses tokens found by a lookup.

        As in SGLang 0.5.23 (`alloc_for_extend` in mem_cache/allocation.py), pages need room for one more page
        per prompt.
        """
        num_chunks, num_tokens, num_blocks = self._num_grown
        if not num_chunks:
            return
        self._num_grown = [0, 0, 0]
        page = self.block_size
        num_wanted = num_tokens + num_chunks * page if page > 1 else num_tokens
        self._evict_for(num_wanted - (self._num_unused + num_blocks) * page)
        self._evict_for(-self._num_unused * page)

    def draw(self, num_ids: int) -> list[int]:
        self.settle()
        return super().draw(num_ids)

    def _evict_for(self, num_tokens: int) -> None:
        if num_tokens > 0:
            self._num_unused += self._tree.evict(num_tokens) // self.block_size

    def evict_ahead(self, num_blocks: int) -> None:
        self.settle()
        self._evict_for((num_blocks - self._num_unused) * self.block_size)

    def touch(self, seq: Sequence) -> None:
        if self._is_lru:
            self._tree.match(self._held(seq).segments, self._most(seq, seq.stored_known))

    def num_matched(self, seq: Sequence) -> int:
        if self.block_size == 1 or seq.stored_known % self.block_size:
            return self.num_cached(seq)
        return self._tree.match(self._held(seq).segments, self._most(seq, seq.stored_known)).num_tokens

    def take(self, num_blocks: int) -> None:
        assert num_blocks <= self.num_free
        self.settle()
        missing = num_blocks - self._num_unused
        if missing > 0:
            self._num_unused += self._tree.evict(missing * self.block_size) // self.block_size
        self._num_unused -= num_blocks
        self.num_free -= num_blocks

    def clear_cache(self) -> None:
        self._num_unused += self._tree.evict(self._tree.num_evictable) // self.block_size
        self._count()

    def computed(self, seq: Sequence, num_tokens: int) -> None:
        """Inserts the full blocks of a sequence's first num_tokens tokens into the tree."""
        held: Holding = seq.kv
        self._insert(seq, num_tokens, held.node if held.has_inserted else None)

    def _insert(self, seq: Sequence, num_tokens: int, above: Node | None) -> None:
        """Inserts tokens; above: see `RadixTree.insert`."""
        held: Holding = seq.kv
        held.has_inserted = True
        num_tokens = self._most(seq, num_tokens)
        num_before = held.num_in_tree
        num_new, node = self._tree.insert(
            held.segments,
            num_tokens,
            priority=-seq.request.priority,
            num_counted_tokens=num_before,
            above=above,
        )
        num_after = node.num_prefix_tokens
        if num_after == num_before:
            return
        num_own = (num_after - num_before) // self.block_size
        num_duplicates = num_own - num_new // self.block_size  # inserted by another sequence before
        self._num_unused += num_duplicates
        if held.ids:
            held.ids += self.draw(num_own - len(held.ids))
            self._free_ids.extend(held.ids[:num_duplicates])
            if num_new:
                node.ids = held.ids[num_duplicates:num_own]
            del held.ids[:num_own]
        if self._listener is not None and num_new:
            node.ids = node.ids or self.draw(num_new // self.block_size)
            self._listener.stored(seq.request_id, node.depth // self.block_size, node.ids)
        self._tree.move_lock(held.node, node)
        held.node, held.num_in_tree = node, num_after
        self._count()

    def release(self, seq: Sequence, num_tokens: int, num_planned: int = 0) -> None:
        held: Holding = seq.kv
        if seq.state is not WAITING:  # the tree keeps what a preempted sequence has already inserted
            self._insert(seq, num_tokens - num_planned, None)
            if 0 < seq.num_prompt_tokens < held.num_in_tree:  # outputs are evicted before their prompt
                self._tree.insert(
                    held.segments,
                    seq.num_prompt_tokens,
                    priority=-seq.request.priority + 1,
                    num_counted_tokens=seq.num_prompt_tokens,
                )
        self._num_unused += self.blocks_for(num_tokens) - held.num_in_tree // self.block_size
        self._free_ids.extend(reversed(held.ids))
        self._tree.unlock(held.node)
        self._count()
        seq.kv = None

    def move_to_branches(self, seq: Sequence, num_tokens: int, num_kept_tokens: int) -> list[int]:
        self.computed(seq, num_kept_tokens)  # swapped-in KV is not in the tree yet
        return super().move_to_branches(seq, num_tokens, num_kept_tokens)

    def give_back(self, seq: Sequence, num_kept: int, num_blocks: int) -> None:
        super().give_back(seq, num_kept, num_blocks)
        self._num_unused += num_blocks

    def free_extra(self, num_blocks: int, ids: Iterable[int]) -> None:
        super().free_extra(num_blocks, ids)
        self._num_unused += num_blocks

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        held: Holding = seq.kv
        nodes, node = [], held.node
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        ids: list[int] = []
        for node in reversed(nodes):
            if not node.ids:
                node.ids = self.draw(node.num_tokens // self.block_size)
            ids += node.ids
        held.ids += self.draw(self.blocks_for(num_tokens) - len(ids) - len(held.ids))
        return ids + held.ids

    def check_integrity(self, held: Iterable[tuple[Sequence, int]]) -> None:
        self._tree.check_integrity()
        num_own = 0
        for seq, num_tokens in held:
            mine: Holding = seq.kv
            assert mine.node.num_prefix_tokens == mine.num_in_tree <= num_tokens
            num_own += self.blocks_for(num_tokens) - mine.num_in_tree // self.block_size
        in_tree = self._tree.num_tokens // self.block_size
        num_accounted = self._num_unused + in_tree + num_own + self.num_extra_blocks
        assert num_accounted == self.num_blocks, "a block is leaked or owned twice"
        assert self.num_free == self._num_unused + self._tree.num_evictable // self.block_size

    def _held(self, seq: Sequence) -> Holding:
        if seq.kv is None:
            seq.kv = Holding(tuple(all_segments(of_rank(seq.request, seq.dp_rank))), self._tree.root)
        held: Holding = seq.kv
        return held

    def _count(self) -> None:
        self.num_free = self._num_unused + self._tree.num_evictable // self.block_size

    def _on_evict(self, leaf: Node) -> None:
        self.num_evicted += leaf.num_tokens // self.block_size
        if self._listener is not None:
            self._listener.removed(leaf.ids[::-1])
        self._free_ids.extend(reversed(leaf.ids))

    def _ids_behind(self, seq: Sequence, num_blocks: int) -> list[int]:
        held: Holding = seq.kv
        num_own = num_blocks - held.num_in_tree // self.block_size
        assert num_own >= 0
        ids = held.ids[num_own:]
        del held.ids[num_own:]
        return ids

    @staticmethod
    def _most(seq: Sequence, num_tokens: int) -> int:
        """Returns the number of the first num_tokens tokens that may be in the tree.

        The outputs of a request with branches may not be in the tree.
        """
        return num_tokens if seq.request.branching is None else min(num_tokens, seq.num_prompt_tokens)
