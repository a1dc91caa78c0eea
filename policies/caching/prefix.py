"""Prefix caching by block hashes, as in vLLM's automatic prefix caching.

Only full blocks are cached. A block is offered to other sequences as soon as it is assigned to known tokens:
the step that computes it writes its KV, layer by layer, before other sequences read it. If the sequence that
computes it is preempted in that step, the sequences that the step has admitted with a hit on the block are
preempted, too. After a hit at least one known token remains to be computed. Free blocks keep their content
and are evicted in the order in which they became free (LRU), the last block of a sequence first. Free blocks
without content are taken before them. The same content may be stored twice if two sequences compute it at the
same time. Prefixes that clients pay for (`Prompt.num_pinned`: prompt caching of APIs) are kept for pin_s
seconds after each use, within a reserved share of the memory. Output tokens with a content id are also
offered as soon as they fill a block (policies/caching/content.py), so a preempted sequence has a hit on
tokens that another sequence with the same answer has generated since. Other output tokens are offered when
their sequence ends or is preempted.

Memory pressure: sequences take free blocks, with content or without; no sequence is preempted to keep
content. Horizon: as paged. Taking blocks evicts content, which may shorten the hit of a waiting prompt but
never lengthens it, so a prompt without room remains without room. The module holds the settings and the pool.
`runs.py` holds its blocks and the listener to offered blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import Ge, Gt, Lt, Unit
from policies.caching.content import ENDLESS, Answers, ContentListener, Places, of_rank
from policies.caching.pool import BlockPool, Caching, KvMemory
from policies.caching.runs import Holding, PinnedTime, Pins, ReportingRuns, Run, Runs
from policies.core.request import Request
from policies.core.sequence import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixCaching(Caching):
    """Settings of a paged cache that keeps the blocks of finished sequences."""

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


MAX_PENDING_EVICTIONS = 512
"""Number of delayed evictions after which whole runs are evicted."""


class PrefixPool(BlockPool):
    """A block pool with contents, which are stored in runs of blocks.

        num_blocks = free without content + free runs (LRU) + runs with owners + blocks without content in use

    The time for a request grows with the segments of its prompt, not with its blocks.
    """

    _counts_private: ClassVar[bool] = True
    """Whether private contents are stored as a number of blocks without runs."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_watermark_blocks: int = 0,
        *,
        pin_s: float = 0.0,
        max_pinned: int = 0,
    ) -> None:
        super().__init__(num_blocks, block_size, num_watermark_blocks)
        self._pins = Pins(pin_s=pin_s, max_blocks=max_pinned, block_size=block_size)
        self._places = Places(block_size)
        self._runs = Runs(self._free_ids)
        self._answers: Answers | None = None
        self._unsettled: dict[int, Sequence] = {}  # sequences with prompt tokens whose KV is not final yet
        self._num_kept = 0  # free blocks with content, except those with a pending eviction

    def look_ahead(self, num_tokens: int) -> bool:
        self.lookahead = num_tokens
        self._places = Places(self.block_size, lookahead=num_tokens)
        return True

    def watch(self, num_readable: Callable[[Sequence], int]) -> None:
        self._answers = Answers(self._offer_now, self.block_size, self.lookahead)
        self._answers.num_readable = num_readable

    def report_to(self, listener: ContentListener) -> bool:
        self._runs = ReportingRuns(self._free_ids, listener, self._runs.on_evict)
        return True

    def report_delayed(self, running: Iterable[Sequence]) -> None:
        """Offers the blocks that were generated since the last call, and performs pending evictions."""
        if self._answers is not None:
            for seq in running:
                if seq.request.answer_id is not None:
                    self.offer_generated(seq)
                    num_final = self._answers.num_generated(seq) - self.num_reprefillable_tokens
                    self._offer_now(seq, num_final // self.block_size)
        self._runs.evict_pending()

    def offer_generated(self, seq: Sequence) -> None:
        if self._answers is not None:
            self._answers.offer(seq)

    @property
    def needs_offers(self) -> bool:
        return bool(self._unsettled) or (self._answers is not None and self._answers.num_shared > 0)

    def offer_known(self, seq: Sequence, num_tokens: int) -> None:
        num_full = num_tokens // self.block_size
        if seq.request_id in self._unsettled:
            num_prompt = seq.num_prompt_tokens // self.block_size
            self._offer_now(seq, min(num_full, num_prompt))
            if num_full >= num_prompt:
                del self._unsettled[seq.request_id]
        if self._answers is not None and self._answers.is_shared(seq):
            self._offer_now(seq, num_full)

    def num_cached(self, seq: Sequence) -> int:
        held = seq.kv or self._new_held(seq)
        limit = max(seq.stored_known - (self.lookahead or 1), 0) // self.block_size
        answers = self._answers
        if answers is not None and answers.writers and answers.offer_for(held.path, limit):
            self.awaits_answer = True
        held.found, num_found = self._runs.find(held.path, limit)
        if num_found and self.drops_last_block:
            held.found, num_found = self._runs.find(held.path, num_found - 1)
        return num_found * self.block_size

    @property
    def num_free_without_content(self) -> int:
        return self.num_free - self._num_kept

    def peek(self, request: Request) -> int:
        path = self._places.known_path(request)
        num_tokens = max(request.prompt.num_tokens - (self.lookahead or 1), 0)
        _, num_found = self._runs.find(path, num_tokens // self.block_size)
        return num_found * self.block_size

    def can_admit(self, seq: Sequence, num_cached: int, is_alone: bool) -> bool:
        need = self.blocks_to_admit(seq)
        if num_cached:
            for run, num_blocks in seq.kv.found:
                if run.owners:
                    need -= num_blocks
        return need <= (self.num_free if is_alone else self.num_free - self.num_watermark_blocks)

    def num_free_found(self, seq: Sequence, num_cached: int) -> int:
        if not num_cached:
            return 0
        return sum(num_blocks for run, num_blocks in seq.kv.found if not run.owners)

    def admit(self, seq: Sequence, num_cached: int) -> None:
        held = seq.kv or self._new_held(seq)
        if num_cached:
            num_blocks = self._runs.hold_found(held, seq.request_id)
            self.num_free -= num_blocks
            self._num_kept -= num_blocks
        elif held.path and held.path[0][1] == ENDLESS:
            held.is_private = self._counts_private and self._runs.is_new_private(held.path[0][0])
        if self._answers is not None and seq.request.answer_id is not None:
            self._answers.begin(seq)

    def grow(self, seq: Sequence, num_held: int, num_tokens: int) -> None:
        block_size = self.block_size
        self.take(-(-num_tokens // block_size) + -num_held // block_size)
        num_offered = num_tokens - seq.num_loading - self.num_reprefillable_tokens
        if self.num_reprefillable_tokens or self.lookahead:
            self._unsettled[seq.request_id] = seq
            num_offered = max(min(num_offered, seq.stored_known - self.lookahead), 0)
        self._offer(seq, num_offered // block_size)

    def loaded(self, seq: Sequence) -> None:
        self._offer(seq, seq.stored_computed // self.block_size)

    def take(self, num_blocks: int) -> None:
        """Takes free blocks: first blocks without content, then those that became free first."""
        self.num_free = num_free = self.num_free - num_blocks
        if num_free < self._num_kept:
            self._evict(self._num_kept - num_free)

    def _evict(self, num_blocks: int) -> None:
        """Adds pending evictions of num_blocks blocks, performed at the next read of a place with content."""
        assert self.num_free >= 0
        self._num_kept = self.num_free
        self.num_evicted += num_blocks
        self._runs.num_pending_evictions += num_blocks
        if self._num_ids_made:  # an engine sees the physical ids
            self._runs.evict_pending()

    def clear_cache(self) -> None:
        num_kept, self._num_kept = self._num_kept, 0
        self.num_evicted += num_kept
        self._runs.num_pending_evictions += num_kept
        self._runs.evict_pending()

    def release(self, seq: Sequence, num_tokens: int, num_planned: int = 0) -> None:
        held: Holding = seq.kv
        block_size = self.block_size
        num_full = (num_tokens - num_planned) // block_size
        if self._unsettled:
            self._unsettled.pop(seq.request_id, None)
        if self.num_reprefillable_tokens:
            num_final = num_tokens - num_planned - self.num_reprefillable_tokens
            num_full = max(num_final, min(num_full * block_size, seq.num_found)) // block_size
        if self._answers is not None and seq.request.answer_id is not None:
            self._answers.end(seq, num_full)
        if held.is_private:
            held.num_private = held.num_with_content = num_full
        elif num_full > held.num_with_content:
            self._offer(seq, num_full)
        elif num_full < held.num_with_content:  # blocks were offered for tokens that will not be computed
            self._runs.withdraw(held, num_full)
        num_tail = -(-num_tokens // block_size) - held.num_with_content
        assert num_tail >= 0
        if self._pins.max_blocks:
            self._pin(seq, held)
        num_kept = self._runs.release(held, seq.request_id)
        self._num_kept += num_kept
        self.num_free += num_kept + num_tail
        if held.tail_ids:
            self._free_ids.extend(reversed(held.tail_ids))
        seq.kv = None
        if self._runs.num_pending_evictions > MAX_PENDING_EVICTIONS:
            self._runs.evict_whole_runs()
        if self._places.should_forget:
            self._places.forget_unused(self._used_places())

    def _pin(self, seq: Sequence, held: Holding) -> None:
        """Pins the paid prefix of a sequence, if the sequence has computed more than its hit."""
        num_pinned = seq.request.prompt.num_pinned
        if num_pinned and seq.stored_computed > seq.num_found:
            self._runs.make_private_run(held, seq.request_id)
            if self._pins.keep(
                self._runs, held, min(num_pinned // self.block_size, held.num_with_content), self.now
            ):
                self.expires_s = self._pins.expires_s

    def sharers(self, seq: Sequence) -> Iterable[int]:
        return self._runs.owners_after(seq.kv, seq.num_computed // self.block_size) - {seq.request_id}

    def owners_found(self, seq: Sequence) -> Iterable[int]:
        found = seq.kv.found
        return found[-1][0].owners if found else ()

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        held: Holding = seq.kv
        self._runs.make_private_run(held, seq.request_id)
        held.is_private = False
        ids: list[int] = []
        for run in held.runs:
            if not run.ids:
                run.ids = self.draw(run.num_blocks)
            ids += run.ids
        num_tail = self.blocks_for(num_tokens) - held.num_with_content
        held.tail_ids += self.draw(num_tail - len(held.tail_ids))
        return ids + held.tail_ids

    def expire(self) -> None:
        while (pin := self._pins.pop_expired(self.now)) is not None:
            num_blocks = self._runs.release(pin.held, pin.number)
            self.num_free += num_blocks
            self._num_kept += num_blocks
        self.expires_s = self._pins.expires_s

    @property
    def num_pinned(self) -> int:
        """Number of blocks of pinned prefixes."""
        return self._pins.num_blocks

    @property
    def pinned_time(self) -> PinnedTime:
        return self._pins.time()

    @property
    def max_tokens_per_seq(self) -> int:
        return (self.num_blocks - self._pins.max_blocks) * self.block_size

    def check_integrity(self, held: Iterable[tuple[Sequence, int]]) -> None:
        self._runs.evict_pending()  # it splits runs that are owned
        num_tail = num_private = 0
        owned: set[Run] = set(self._pins.runs)
        for seq, num_tokens in held:
            mine: Holding = seq.kv
            assert mine.num_with_content == sum(run.num_blocks for run in mine.runs) + mine.num_private
            assert mine.num_with_content <= self.blocks_for(num_tokens)
            assert all(run.owners[seq.request_id] is mine for run in mine.runs)
            num_tail += self.blocks_for(num_tokens) - mine.num_with_content
            num_private += mine.num_private
            owned.update(mine.runs)
        self._pins.check_integrity()
        num_free, num_held = self._runs.check_integrity(owned)
        assert num_free == self._num_kept
        num_accounted = self.num_free + num_held + num_private + num_tail + self.num_extra_blocks
        assert num_accounted == self.num_blocks, "a block is leaked or owned twice"

    def _new_held(self, seq: Sequence) -> Holding:
        """Creates the `Holding` of a waiting sequence at its first lookup."""
        held = seq.kv = Holding(self._places.path(of_rank(seq.request, seq.dp_rank)))
        return held

    def _offer(self, seq: Sequence, num_full: int) -> None:
        """Assigns contents to a sequence's first num_full blocks, after equal blocks of others."""
        held: Holding = seq.kv
        if held.is_private:  # no other sequence generates or finds its blocks
            if num_full > held.num_with_content:
                held.num_private = held.num_with_content = num_full
            return
        answers = self._answers
        if answers is not None and answers.writers and answers.offer_before(seq):
            self.awaits_answer = True
        self._offer_now(seq, num_full)

    def _offer_now(self, seq: Sequence, num_full: int) -> None:
        """Assigns contents to those of a sequence's first num_full blocks that have none."""
        held: Holding = seq.kv
        num_new = num_full - held.num_with_content
        if num_new <= 0:
            return
        if held.is_private or (held.num_private and num_full <= held.path[-1][1]):  # so are the new blocks
            held.num_private += num_new
            held.num_with_content = num_full
            return
        if held.tail_ids:  # a partly filled block must keep its id
            held.tail_ids += self.draw(num_new - len(held.tail_ids))
        start = 0  # number, in the sequence, of a place's first block
        for place, end in held.path:
            if num_full <= end:
                self._offer_part(seq, held, place, held.num_with_content - start, num_full - start)
                return
            if end > held.num_with_content:
                self._offer_part(seq, held, place, held.num_with_content - start, end - start)
            start = end

    def _offer_part(self, seq: Sequence, held: Holding, place: int, first: int, end: int) -> None:
        """Offers the blocks first to end - 1 of a place, which are the next blocks of a sequence."""
        self._runs.extend(held, seq.request_id, place, first, end)

    def _used_places(self) -> set[int]:
        """Returns the places with content."""
        return self._runs.places

    def _ids_behind(self, seq: Sequence, num_blocks: int) -> list[int]:
        held: Holding = seq.kv
        num_tail = num_blocks - held.num_with_content
        assert num_tail >= 0
        ids = held.tail_ids[num_tail:]
        del held.tail_ids[num_tail:]
        return ids
