"""A cache with one block table per group of layers, for models with windows (vLLM's hybrid KV cache manager).

Prefixes are found as in `prefix` if all groups have the KV that their attention reaches: all blocks for full
attention, the last ones for a window. `block_tables.KvGroup` defines the groups and their rules. Memory
pressure: as `prefix`. A sequence with a full window holds a constant number of blocks in the groups with that
window. Horizon: as `paged`, and up to the token with which a sequence's window moves past a block, so leaps
are short.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import Ge, Lt, Unit
from policies.caching.block_tables import KvGroup
from policies.caching.content import PathPart, Places, of_rank
from policies.caching.pool import BlockPool, Caching, KvMemory
from policies.core.plan import Content
from policies.core.request import Request
from policies.core.sequence import PAGED, Growth, Sequence


class CachedBlock:
    """A block with content, and the request ids of its owners."""

    __slots__ = ("content", "group", "owners")

    def __init__(self, group: int, content: Content, owner: int) -> None:
        self.group = group
        self.content = content
        self.owners = {owner}


class Tables:
    """The block tables of a sequence.

    tables[g][n]: block n of group g, while it has content and its attention still reaches it.
    """

    __slots__ = (
        *("chunk_iteration", "found", "num_before_chunk", "num_in_chunks"),
        *("num_skipped", "num_with_content", "path", "tables"),
    )

    def __init__(self, path: list[PathPart], num_groups: int) -> None:
        self.path = path
        self.found: list[list[CachedBlock | None]] = []  # tables of the cached tokens, per group
        self.tables: list[list[CachedBlock | None]] = [[] for _ in range(num_groups)]
        self.num_with_content = 0  # first blocks of the sequence with content
        self.num_skipped = [0] * num_groups  # first blocks that a group does not hold
        self.num_in_chunks = 0  # tokens that were cached or computed in chunks
        self.num_before_chunk = 0  # those before the last chunk
        self.chunk_iteration = 0  # committed iterations at the last chunk


class GroupPool(BlockPool):
    """A block pool with several block tables per sequence; `groups` defines the blocks that each keeps.

    max_in_flight_tokens: maximum number of tokens in planned, unfinished steps. A sequence is admitted if its
    maximum number of simultaneously held blocks is free, which may be less than the blocks for all its
    tokens.

    The pool of a cache with KV groups: one block table per group (`KvGroup`), all blocks from one pool.

    Blocks without content are only counted. Blocks with content, which later sequences can find, are objects
    in an index; while no sequence owns them, they are also in the eviction order.

        num_blocks = free without content + free with content (LRU) + blocks of sequences, with and without
        content
    """

    can_fork: ClassVar[bool] = False
    slides: ClassVar[bool] = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_watermark_blocks: int = 0,
        *,
        groups: tuple[KvGroup, ...],
        max_in_flight_tokens: int,
        max_model_len: int,
        keeps_content: bool = True,
    ) -> None:
        super().__init__(num_blocks, block_size, num_watermark_blocks)
        self.groups = groups
        self.num_tables = len(groups)
        self._plans_ahead = False
        self._max_blocks = [
            group.max_blocks(max_in_flight_tokens, max_model_len, block_size) for group in groups
        ]
        self._keeps_content = keeps_content
        self._places = Places(block_size)
        self._index: list[dict[Content, dict[CachedBlock, None]]] = [{} for _ in groups]
        self._unowned: OrderedDict[CachedBlock, None] = OrderedDict()  # the first is evicted first
        self._kinds: dict[tuple[int | None, bool], list[int]] = {}  # groups that keep the same tokens
        for number, group in enumerate(groups):
            self._kinds.setdefault((group.window, group.is_chunked), []).append(number)

    def plan_ahead(self) -> None:
        """Keeps the blocks that the attention of the step in flight reaches until the step has ended."""
        self._plans_ahead = True

    # Lookups.

    def num_cached(self, seq: Sequence) -> int:
        held = seq.kv or self._new_tables(seq)
        held.found = []
        if not self._keeps_content:
            return 0
        contents = list(_contents(held.path, 0, (seq.stored_known - 1) // self.block_size))
        num_hit = self._longest_hit(contents)
        if num_hit:
            num_skipped = self._num_skipped(num_hit * self.block_size)
            held.found = [
                [None] * skipped + [next(iter(index[content])) for content in contents[skipped:num_hit]]
                for index, skipped in zip(self._index, num_skipped, strict=True)
            ]
        return num_hit * self.block_size

    def peek(self, request: Request) -> int:
        if not self._keeps_content:
            return 0
        limit = (request.prompt.num_tokens - 1) // self.block_size
        return (
            self._longest_hit(list(_contents(self._places.known_path(request), 0, limit))) * self.block_size
        )

    def _longest_hit(self, contents: list[Content]) -> int:
        """Returns the number of leading blocks after which all groups can continue."""
        num_hit, before = len(contents), -1
        while num_hit != before:
            before = num_hit
            for numbers in self._kinds.values():
                indexes = [self._index[number] for number in numbers]
                num_hit = self.groups[numbers[0]].longest_hit(
                    lambda block, indexes=indexes: all(contents[block] in index for index in indexes),  # type: ignore[misc]
                    num_hit,
                    self.block_size,
                )
        return num_hit

    def _num_skipped(self, num_computed: int) -> list[int]:
        """Returns per group the number of leading blocks not needed once num_computed tokens are computed."""
        return [group.num_skipped(num_computed) // self.block_size for group in self.groups]

    # Admission and growth.

    def can_admit(self, seq: Sequence, num_cached: int, is_alone: bool) -> bool:
        """Returns whether there is room for its simultaneously held blocks and for its first chunk."""
        room = self.num_free if is_alone else self.num_free - self.num_watermark_blocks
        room -= self.num_free_found(seq, num_cached) + seq.num_adapter_blocks + self.num_state_blocks
        if self._num_missing(num_cached, self.num_first_tokens, is_capped=False) > room:
            return False
        return (
            bool(seq.num_unreserved_blocks)
            or self._num_missing(num_cached, seq.stored_known, is_capped=True) <= room
        )

    def _num_missing(self, num_cached: int, num_tokens: int, *, is_capped: bool) -> int:
        """Counts the blocks of all groups for num_tokens tokens, without those of cached tokens."""
        num_blocks, num_hit = self.blocks_for(num_tokens), num_cached // self.block_size
        if not is_capped:
            return self.num_tables * max(0, num_blocks - num_hit)
        return sum(max(0, min(num_blocks, most) - num_hit) for most in self._max_blocks)

    def num_free_found(self, seq: Sequence, num_cached: int) -> int:
        if not num_cached:
            return 0
        return sum(block is not None and not block.owners for table in seq.kv.found for block in table)

    def blocks_to_admit(self, seq: Sequence) -> int:
        num_more = seq.num_adapter_blocks + self.num_state_blocks
        return self._num_missing(0, seq.stored_known, is_capped=True) + num_more

    @property
    def max_tokens_per_seq(self) -> int:
        def fits(num_tokens: int) -> bool:
            return self._num_missing(0, num_tokens, is_capped=True) <= self.num_blocks

        fewest, most = 0, self.num_blocks * self.block_size + 1  # fits, does not fit unless there is a cap
        if fits(most):
            return 2**62
        while most - fewest > 1:
            middle = (fewest + most) // 2
            fewest, most = (middle, most) if fits(middle) else (fewest, middle)
        return fewest

    def admit(self, seq: Sequence, num_cached: int) -> None:
        held: Tables = seq.kv or self._new_tables(seq)
        held.num_in_chunks = num_cached
        if not num_cached:
            return
        for table in held.found:
            for block in table:
                if block is None:
                    continue
                if not block.owners:
                    del self._unowned[block]
                    self.num_free -= 1
                block.owners.add(seq.request_id)
        held.tables, held.found = held.found, []
        held.num_with_content = num_cached // self.block_size
        held.num_skipped = self._num_skipped(num_cached)

    def blocks_to_grow(self, seq: Sequence, num_held: int, num_tokens: int) -> int:
        return self.num_tables * (self.blocks_for(num_tokens) - self.blocks_for(num_held))

    def grow(self, seq: Sequence, num_held: int, num_tokens: int) -> None:
        num_blocks, num_before = self.blocks_for(num_tokens), self.blocks_for(num_held)
        if not seq.num_loading:
            self.take(self.num_tables * (num_blocks - num_before))
            self._offer(seq, num_tokens // self.block_size)
            return
        skipped = self._num_skipped(num_tokens)  # loaded KV that no layer of a group attends to gets no block
        self.take(sum(num_blocks - max(num_before, first) for first in skipped))
        self._slide_to(seq, skipped, num_before)

    def loaded(self, seq: Sequence) -> None:
        self._offer(seq, seq.stored_computed // self.block_size)

    def computed(self, seq: Sequence, num_tokens: int) -> None:
        held: Tables = seq.kv
        held.num_before_chunk, held.num_in_chunks = held.num_in_chunks, num_tokens
        held.chunk_iteration = self.num_iterations

    def slide(self, seq: Sequence, num_computed: int) -> None:
        skipped = self._num_skipped(self._num_ended(seq, num_computed))
        before = seq.kv.num_skipped
        if self._plans_ahead:
            skipped = list(map(max, skipped, before))
        if skipped != before:
            self._offer(seq, num_computed // self.block_size)
            self._slide_to(seq, skipped, self.blocks_for(num_computed))

    def _num_ended(self, seq: Sequence, num_computed: int) -> int:
        """Returns the number of a sequence's computed tokens in finished steps."""
        held: Tables = seq.kv
        if not self._plans_ahead:
            return num_computed
        if held.chunk_iteration == self.num_iterations:
            return held.num_before_chunk
        return num_computed - (num_computed > held.num_in_chunks)

    def _slide_to(self, seq: Sequence, skipped: list[int], num_blocks: int) -> None:
        """Frees the first skipped[g] of the num_blocks blocks of each group g of a sequence."""
        held: Tables = seq.kv
        for table, before, first in zip(held.tables, held.num_skipped, skipped, strict=True):
            self.num_free += max(0, min(first, num_blocks) - before)
            freed = table[before:first]
            table[before:first] = [None] * len(freed)
            self._disown(freed, seq.request_id)
        held.num_skipped = skipped

    def growth(self, seq: Sequence) -> Growth:
        """Returns growth by a block per group, up to the token with which a window moves past a block."""
        limits = [
            group.next_skip(skipped, self.block_size)
            for group, skipped in zip(self.groups, seq.kv.num_skipped, strict=True)
        ]
        until = min((limit for limit in limits if limit is not None), default=seq.max_num_tokens)
        if self._plans_ahead and until > self._num_ended(seq, seq.stored_computed):
            # A token's step has ended when the step after the next one is planned.
            until = max(until, seq.stored_computed) + 1
        return PAGED if until >= seq.max_num_tokens else Growth(until=until)

    # Contents.

    @property
    def num_free_without_content(self) -> int:
        return self.num_free - len(self._unowned)

    copies = True

    @property
    def num_free_without_copy(self) -> int:
        """Number of free blocks per group, because a decode takes one block in every group."""
        return self.num_free // self.num_tables

    @property
    def replans_chunks(self) -> bool:
        return True

    def take(self, num_blocks: int) -> None:
        """Takes free blocks: first blocks without content, then those that became free first."""
        super().take(num_blocks)
        while len(self._unowned) > self.num_free:
            self._evict()

    def clear_cache(self) -> None:
        while self._unowned:
            self._evict()

    def _evict(self) -> None:
        block, _ = self._unowned.popitem(last=False)
        self._forget(block)
        self.num_evicted += 1

    def _forget(self, block: CachedBlock) -> None:
        """Removes the content of a block from the index."""
        index = self._index[block.group]
        equal = index[block.content]
        del equal[block]
        if not equal:
            del index[block.content]

    def _offer(self, seq: Sequence, num_full: int) -> None:
        """Assigns contents to those of a sequence's first num_full blocks that have none."""
        held: Tables = seq.kv
        first = held.num_with_content
        if not self._keeps_content or num_full <= first:
            return
        held.num_with_content = num_full
        for group, (table, index) in enumerate(zip(held.tables, self._index, strict=True)):
            for number, content in enumerate(_contents(held.path, first, num_full), first):
                if number < held.num_skipped[group]:
                    table.append(None)
                    continue
                block = CachedBlock(group, content, seq.request_id)
                index.setdefault(content, {})[block] = None
                table.append(block)

    def _withdraw(self, seq: Sequence, num_full: int) -> None:
        """Removes the contents of the blocks after the first num_full ones: they will not be computed."""
        held: Tables = seq.kv
        for table in held.tables:
            for block in table[num_full:]:
                if block is not None:
                    self._forget(block)
            del table[num_full:]
        held.num_with_content = num_full

    def _disown(self, blocks: list[CachedBlock | None], request_id: int) -> None:
        """Removes an owner; blocks without owners are evicted in reverse order of the sequence.

        All blocks must already be counted as free, including those with other owners.
        """
        for block in reversed(blocks):
            if block is None:
                continue
            block.owners.remove(request_id)
            if block.owners:
                self.num_free -= 1
            else:
                self._unowned[block] = None

    def release(self, seq: Sequence, num_tokens: int, num_planned: int = 0) -> None:
        held: Tables = seq.kv
        num_full = (num_tokens - num_planned) // self.block_size
        if num_full >= held.num_with_content:
            self._offer(seq, num_full)
        else:
            self._withdraw(seq, num_full)
        self.num_free += self.blocks_held(seq, num_tokens)
        for table in held.tables:
            self._disown(table, seq.request_id)
        assert self.num_free <= self.num_blocks
        seq.kv = None
        if self._places.should_forget:
            self._places.forget_unused({place for index in self._index for place, _ in index})

    def sharers(self, seq: Sequence) -> Iterable[int]:
        first = seq.num_computed // self.block_size
        owners = {
            owner
            for table in seq.kv.tables
            for block in table[first:]
            if block is not None
            for owner in block.owners
        }
        return owners - {seq.request_id}

    def blocks_held(self, seq: Sequence, num_tokens: int) -> int:
        held: Tables = seq.kv
        return self.num_tables * self.blocks_for(num_tokens) - sum(held.num_skipped)

    def check_integrity(self, held: Iterable[tuple[Sequence, int]]) -> None:
        num_blank = 0
        owned: dict[CachedBlock, set[int]] = {}
        for seq, num_tokens in held:
            mine = [block for table in seq.kv.tables for block in table if block is not None]
            num_blank += self.blocks_held(seq, num_tokens) - len(mine)
            for block in mine:
                owned.setdefault(block, set()).add(seq.request_id)
        assert all(block.owners == owners for block, owners in owned.items())
        indexed = [block for index in self._index for equal in index.values() for block in equal]
        assert set(indexed) == owned.keys() | self._unowned.keys()
        assert not owned.keys() & self._unowned.keys()
        assert len(self._unowned) <= self.num_free
        assert num_blank + len(owned) + self.num_extra_blocks + self.num_free == self.num_blocks, (
            "a block is leaked or owned twice"
        )

    def _new_tables(self, seq: Sequence) -> Tables:
        """Creates the tables of a waiting sequence at its first lookup."""
        tables = seq.kv = Tables(self._places.path(of_rank(seq.request, seq.dp_rank)), self.num_tables)
        return tables


def _contents(path: list[PathPart], first: int, end: int) -> Iterator[Content]:
    """Yields the contents of a sequence's blocks first to end - 1, as far as its path reaches."""
    start = 0  # number, in the sequence, of a place's first block
    for place, place_end in path:
        for number in range(max(first, start), min(end, place_end)):
            yield place, number - start
        start = place_end


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
