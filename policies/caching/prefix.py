"""Prefix caching by block hashes, as vLLM's automatic prefix caching does it.

Full blocks only. A block is offered to others from the moment at which it is handed out for known tokens: the
step that computes it writes its KV, layer by layer, before others read it. A hit leaves at least one known
token to compute. Blocks that nobody holds stay, and are taken for other contents in the order in which they
became free (LRU), the tail of a sequence before its head; blocks without content go first. The same content
may be stored twice, if two sequences computed it side by side. Prefixes that clients pay for
(`Prompt.num_pinned`: prompt caching as APIs sell it) are kept for pin_s after each use, within a share of the
memory that is set aside for them. Generated tokens are offered, too, when their sequence has ended or was
preempted: the next turn of a conversation finds prompt and answer.

Memory pressure: who needs blocks takes free ones, contents or not; nobody is preempted to keep contents.
Horizon: as paged. Taking blocks evicts contents, which may shorten, never lengthen, what a waiting prompt
would find, and leaves it as short of room as it was.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from policies.caching.content import Places, Stretch
from policies.caching.pool import BlockPool, Caching, KvMemory, check_watermark
from policies.sequence import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefixCaching(Caching):
    """Settings of a paged cache that keeps the blocks of the past."""

    watermark: float = 0.0
    """Share of all blocks that an admission must leave free while others run."""
    pin_s: float = 300.0
    """For how long after its last use the KV of a pinned prefix is kept (`Prompt.num_pinned`)."""
    max_pinned_share: float = 0.0
    """Share of all blocks that pinned prefixes may hold, and no sequence may.

    What does not fit is not pinned.
    """

    def __post_init__(self) -> None:
        Caching.__post_init__(self)
        check_watermark(self.watermark)
        if not self.pin_s > 0:
            raise ValueError(f"pin_s={self.pin_s}: must be > 0 s")
        if not 0 <= self.max_pinned_share < 1:
            raise ValueError(f"max_pinned_share={self.max_pinned_share}: must be >= 0 and < 1")

    def pool(self, memory: KvMemory) -> PrefixPool:
        """An empty pool."""
        pool = PrefixPool(memory.num_blocks, self.block_size, int(self.watermark * memory.num_blocks))
        pool.pin_s = self.pin_s
        pool.max_pinned = int(self.max_pinned_share * memory.num_blocks)
        return pool


class Run:
    """Blocks with contents, one behind the other at one place: its blocks first to first + num_blocks - 1.

    owners: who holds it: sequences by request id, pins by numbers below 0. ids: physical blocks, once
    somebody asked. A copy is not offered: another run has the same contents.
    """

    __slots__ = ("first", "ids", "is_copy", "num_blocks", "owners", "place")

    def __init__(
        self, place: int, first: int, num_blocks: int, ids: list[int], is_copy: bool = False
    ) -> None:
        self.place = place
        self.first = first
        self.num_blocks = num_blocks
        self.ids = ids
        self.owners: dict[int, Held] = {}
        self.is_copy = is_copy

    @property
    def end(self) -> int:
        """The block behind its last."""
        return self.first + self.num_blocks


class Held:
    """What a sequence holds: runs, from its first block on, and then blocks that have no content yet."""

    __slots__ = ("found", "num_keyed", "path", "runs", "tail_ids")

    def __init__(self, path: list[Stretch]) -> None:
        self.path = path
        self.found: list[tuple[Run, int]] = []  # while it waits: by the last look
        self.runs: list[Run] = []
        self.num_keyed = 0  # blocks in runs
        self.tail_ids: list[int] = []  # of the blocks behind them, as far as somebody asked


class Pin:
    """A prefix that is kept until a time, whoever uses it."""

    __slots__ = ("held", "number", "since_s", "until_s")

    def __init__(self, number: int, held: Held, since_s: float) -> None:
        self.number = number
        self.held = held
        self.since_s = since_s
        self.until_s = since_s


class PrefixPool(BlockPool):
    """A block pool whose blocks have contents, counted and moved in runs.

        num_blocks = fresh (free, no content) + runs that nobody holds (free, LRU) + runs held + tails held

    Costs per request grow with the named pieces of its prompt, not with its blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, num_watermark_blocks: int = 0) -> None:
        super().__init__(num_blocks, block_size, num_watermark_blocks)
        self.num_evicted = 0
        """Blocks whose content was given up for another."""
        self.pin_s = 0.0
        self.max_pinned = 0
        self.num_pinned = 0
        """Blocks that are kept for pinned prefixes."""
        self.pinned_token_s = 0.0
        """Tokens kept times seconds, of pins that have ended."""
        self._pins: OrderedDict[tuple[int, int], Pin] = OrderedDict()  # place, blocks -> pin
        self._num_pins_made = 0
        self._places = Places(block_size)
        self._num_fresh = num_blocks
        self._lru: OrderedDict[Run, None] = OrderedDict()  # in the order in which they became free
        self._at: dict[int, list[Run]] = {}  # place -> the runs offered there, by their first block
        self._copies: dict[int, list[Run]] = {}  # place -> runs not offered, in the order of their making

    def num_cached(self, seq: Sequence) -> int:
        held = self._held(seq)
        held.found, num_found = self._find(held, (seq._known - 1) // self.block_size)
        return num_found * self.block_size

    def can_admit(self, seq: Sequence, num_cached: int, is_alone: bool) -> bool:
        need = self.blocks_to_admit(seq)
        if num_cached:
            for run, num_blocks in self._held(seq).found:
                if run.owners:
                    need -= num_blocks
        return need <= (self.num_free if is_alone else self.num_free - self.num_watermark_blocks)

    def admit(self, seq: Sequence, num_cached: int) -> None:
        held = self._held(seq)
        if num_cached:
            for run, num_blocks in held.found:
                if num_blocks < run.num_blocks:
                    run = self._split(run, num_blocks)
                if not run.owners:
                    del self._lru[run]
                    self.num_free -= num_blocks
                run.owners[seq.request_id] = held
                held.runs.append(run)
                held.num_keyed += num_blocks
        held.found = []

    def grow(self, seq: Sequence, num_held: int, num_tokens: int) -> None:
        self.take(self.blocks_to_grow(seq, num_held, num_tokens))
        self._offer(seq, (num_tokens - seq._num_loading) // self.block_size)

    def loaded(self, seq: Sequence) -> None:
        self._offer(seq, seq._computed // self.block_size)

    def take(self, num_blocks: int) -> None:
        """Blocks for new contents: those without any first, then those that became free first."""
        assert num_blocks <= self.num_free
        self.num_free -= num_blocks
        self._num_fresh -= num_blocks
        while self._num_fresh < 0:
            run = next(iter(self._lru))
            num_evicted = min(run.num_blocks, -self._num_fresh)
            self._evicted(run, num_evicted)
            if num_evicted == run.num_blocks:
                del self._lru[run]
            self._drop_last(run, num_evicted)
            self.num_evicted += num_evicted
            self._num_fresh += num_evicted

    def release(self, seq: Sequence, num_tokens: int, num_planned: int = 0) -> None:
        held: Held = seq._kv
        num_full = (num_tokens - num_planned) // self.block_size
        self._offer(seq, num_full)
        num_withdrawn = held.num_keyed - num_full
        while held.num_keyed > num_full:  # offered for tokens that will not be computed
            run = held.runs[-1]
            num_blocks = min(run.num_blocks, held.num_keyed - num_full)
            held.num_keyed -= num_blocks
            if num_blocks == run.num_blocks:
                held.runs.pop()
            self._drop_last(run, num_blocks)
        num_tail = self.blocks_for(num_tokens) - held.num_keyed
        assert num_tail >= max(0, num_withdrawn)
        self.num_free += num_tail
        self._num_fresh += num_tail
        if seq.request.prompt.num_pinned:
            self._pin(seq, held)
        self._let_go(held, seq.request_id)
        self._free_ids.extend(reversed(held.tail_ids))
        seq._kv = None
        if self._places.is_crowded:
            self._places.forget(self._used_places())

    def give_back(self, num_blocks: int, ids: Iterable[int]) -> None:
        super().give_back(num_blocks, ids)
        self._num_fresh += num_blocks

    def block_ids(self, seq: Sequence, num_tokens: int) -> list[int]:
        held: Held = seq._kv
        ids: list[int] = []
        for run in held.runs:
            if not run.ids:
                run.ids = self.draw(run.num_blocks)
            ids += run.ids
        num_tail = self.blocks_for(num_tokens) - held.num_keyed
        held.tail_ids += self.draw(num_tail - len(held.tail_ids))
        return ids + held.tail_ids

    def check_integrity(self, held: Iterable[tuple[Sequence, int]]) -> None:
        runs = {run for offered in self._at.values() for run in offered}
        copies = {run for copies in self._copies.values() for run in copies}
        assert all(not run.is_copy for run in runs)
        assert all(run.is_copy for run in copies)
        num_tail = 0
        owned: set[Run] = set()
        for seq, num_tokens in held:
            mine: Held = seq._kv
            assert mine.num_keyed == sum(run.num_blocks for run in mine.runs)
            assert mine.num_keyed <= self.blocks_for(num_tokens)
            assert all(run.owners[seq.request_id] is mine for run in mine.runs)
            num_tail += self.blocks_for(num_tokens) - mine.num_keyed
            owned.update(mine.runs)
        for pin in self._pins.values():
            assert all(run.owners[pin.number] is pin.held for run in pin.held.runs)
            owned.update(pin.held.runs)
        assert owned | self._lru.keys() == runs | copies, "a run is lost"
        assert not owned & self._lru.keys(), "a run is held and free"
        free = self._num_fresh + sum(run.num_blocks for run in self._lru)
        assert free == self.num_free
        held_blocks = sum(run.num_blocks for run in owned)
        num_accounted = free + held_blocks + num_tail + self.num_apart
        assert num_accounted == self.num_blocks, "a block is leaked or owned twice"
        for offered in self._at.values():
            assert offered
            assert all(one.end <= other.first for one, other in pairwise(offered))

    def _let_go(self, held: Held, owner: int) -> None:
        """Free the runs that nobody else holds, the last first."""
        for run in reversed(held.runs):
            del run.owners[owner]
            if not run.owners:
                self._lru[run] = None
                self.num_free += run.num_blocks

    def _pin(self, seq: Sequence, held: Held) -> None:
        """Keep the pinned prefix of a sequence that leaves, or keep it longer if it is kept already."""
        num_blocks = min(seq.request.prompt.num_pinned // self.block_size, held.num_keyed)
        place = next((stretch.place for stretch in held.path if stretch.end >= num_blocks), -1)
        pin = self._pins.get((place, num_blocks))
        if pin is None:
            if not 0 < num_blocks <= self.max_pinned - self.num_pinned:
                return
            self._num_pins_made += 1
            pin = Pin(-self._num_pins_made, Held(held.path), self.now)
            self._pins[place, num_blocks] = pin
            self.num_pinned += num_blocks
            while pin.held.num_keyed < num_blocks:
                run = held.runs[len(pin.held.runs)]
                num_missing = num_blocks - pin.held.num_keyed
                if run.num_blocks > num_missing:
                    run = self._split(run, num_missing)
                run.owners[pin.number] = pin.held
                pin.held.runs.append(run)
                pin.held.num_keyed += run.num_blocks
        pin.until_s = self.now + self.pin_s
        self._pins.move_to_end((place, num_blocks))
        self.expires_s = next(iter(self._pins.values())).until_s

    def expire(self) -> None:
        while self._pins:
            key, pin = next(iter(self._pins.items()))
            if pin.until_s > self.now:
                break
            del self._pins[key]
            self.num_pinned -= pin.held.num_keyed
            self.pinned_token_s += pin.held.num_keyed * self.block_size * (pin.until_s - pin.since_s)
            self._let_go(pin.held, pin.number)
        self.expires_s = next(iter(self._pins.values())).until_s if self._pins else float("inf")

    def pinned_token_s_until(self, end_s: float) -> float:
        """`pinned_token_s`, and what the pins that there are add to it up to end_s."""
        return self.pinned_token_s + sum(
            pin.held.num_keyed * self.block_size * (min(end_s, pin.until_s) - pin.since_s)
            for pin in self._pins.values()
        )

    @property
    def max_tokens_per_seq(self) -> int:
        return (self.num_blocks - self.max_pinned) * self.block_size

    def _held(self, seq: Sequence) -> Held:
        """What a waiting sequence is about to hold; made when it is first looked at, for its path."""
        if seq._kv is None:
            seq._kv = Held(self._places.path(seq.request))
        held: Held = seq._kv
        return held

    def _find(self, held: Held, limit: int) -> tuple[list[tuple[Run, int]], int]:
        """The runs that begin a waiting sequence, and how many blocks of each it may use: limit in all."""
        found: list[tuple[Run, int]] = []
        num_found, at = 0, self._at
        for place, end in held.path:
            wanted = (end if end < limit else limit) - num_found
            next_block = 0
            for run in at.get(place, ()):
                if run.first != next_block or next_block == wanted:
                    break
                num_blocks = min(run.num_blocks, wanted - next_block)
                next_block += num_blocks
                found.append((run, num_blocks))
            num_found += next_block
            if next_block < wanted or num_found == limit:
                break
        return found, num_found

    def _offer(self, seq: Sequence, num_full: int) -> None:
        """Give the first num_full blocks of a sequence their contents, as far as they have none yet."""
        held: Held = seq._kv
        if num_full <= held.num_keyed:
            return
        start = 0  # the sequence's first block of the stretch
        for place, end in held.path:
            if end > held.num_keyed:
                upto = min(end, num_full)
                self._offer_stretch(seq, held, place, held.num_keyed - start, upto - start)
                held.num_keyed = upto
                if upto == num_full:
                    return
            start = end

    def _offer_stretch(self, seq: Sequence, held: Held, place: int, first: int, end: int) -> None:
        """Make runs of the place's blocks first to end - 1: copies, where others offer those already."""
        offered = self._at.get(place)
        if offered is None and not held.tail_ids:
            run = Run(place, first, end - first, [])
            run.owners[seq.request_id] = held
            held.runs.append(run)
            self._at[place] = [run]
            return
        offered = self._at.setdefault(place, [])
        index = len(offered)
        while index and offered[index - 1].end > first:
            index -= 1
        while first < end:
            other = offered[index] if index < len(offered) else None
            is_copy = other is not None and other.first <= first
            upto = end if other is None else min(end, other.end if is_copy else other.first)
            ids, held.tail_ids = held.tail_ids[: upto - first], held.tail_ids[upto - first :]
            if len(ids) < upto - first:  # not asked for, or not all
                self._free_ids.extend(ids)
                ids = []
            run = Run(place, first, upto - first, ids, is_copy)
            run.owners[seq.request_id] = held
            held.runs.append(run)
            if is_copy:
                self._copies.setdefault(place, []).append(run)
            else:
                offered.insert(index, run)
            index += 1
            first = upto

    def _split(self, run: Run, num_blocks: int) -> Run:
        """Cut a run behind num_blocks blocks. Returns the head; the rest stays what and where it was."""
        head = Run(run.place, run.first, num_blocks, run.ids[:num_blocks], run.is_copy)
        head.owners = dict(run.owners)
        for owner in run.owners.values():
            runs = owner.runs
            runs.insert(runs.index(run), head)
        same_kind = (self._copies if run.is_copy else self._at)[run.place]
        same_kind.insert(same_kind.index(run), head)
        run.first += num_blocks
        run.num_blocks -= num_blocks
        run.ids = run.ids[num_blocks:]
        if not run.owners:  # the head goes right behind the rest: a tail goes before its head
            self._lru[head] = None
            if run.is_copy:
                behind = list(self._lru)
                for other in behind[behind.index(run) + 1 : -1]:
                    self._lru.move_to_end(other)
        return head

    def _drop_last(self, run: Run, num_blocks: int) -> None:
        """The last blocks of a run lose their contents, and the run those blocks."""
        run.num_blocks -= num_blocks
        if run.ids:
            self._free_ids.extend(reversed(run.ids[run.num_blocks :]))
            del run.ids[run.num_blocks :]
        by_place = self._copies if run.is_copy else self._at
        if not run.num_blocks:
            by_place[run.place].remove(run)
            if not by_place[run.place]:
                del by_place[run.place]
        if not run.is_copy and run.place in self._copies:
            self._promote(run.place, run.end, run.end + num_blocks)

    def _promote(self, place: int, first: int, end: int) -> None:
        """Offer copies, the oldest first, of blocks that are not offered any more."""
        while first < end:
            candidates = [run for run in self._copies.get(place, ()) if run.first < end and run.end > first]
            covering = [run for run in candidates if run.first <= first]
            if not covering:
                first = min((run.first for run in candidates), default=end)
                continue
            run = covering[0]
            later = [other.first for other in candidates[: candidates.index(run)] if other.first > first]
            if run.first < first:
                self._split(run, first - run.first)
            upto = min([run.end, end, *later])
            if upto < run.end:
                run = self._split(run, upto - first)
            self._copies[place].remove(run)
            if not self._copies[place]:
                del self._copies[place]
            run.is_copy = False
            offered = self._at.setdefault(place, [])
            offered.insert(sum(other.first < first for other in offered), run)
            first = upto

    def _used_places(self) -> set[int]:
        """Where there are contents."""
        return self._at.keys() | self._copies.keys()

    def _evicted(self, run: Run, num_blocks: int) -> None:
        """The last blocks of a free run are about to lose their contents to make room."""

    def _ids_behind(self, seq: Sequence, num_blocks: int) -> list[int]:
        held: Held = seq._kv
        assert held.num_keyed == num_blocks
        ids, held.tail_ids = held.tail_ids, []
        return ids
