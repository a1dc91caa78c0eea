"""The blocks of a prefix cache, stored as runs: consecutive blocks at one place of `content.Places`.

This is the state that vLLM's block pool keeps block by block: the hash table of cached blocks (here: the runs
that are *offered* at each place), the owners of each block instead of a reference count, and the free queue
in LRU order. A run stands for many blocks, so the time of all operations grows with the number of runs.

    place 5    | 0 1 2 | 3 | 4 5 6 7 |      three offered runs; a run is split where a sequence uses a part
               | 0 1 |                      a copy: another sequence computed blocks 0 and 1 at the same time

Each block of a place is offered once. A sequence that computed the same content at the same time owns a copy,
which is offered when the offered block is evicted. A run without owners is free: it keeps its content until
its blocks are needed, and free runs are evicted in the order in which they became free.

Private content (see `content`) is stored as a number of blocks without a run, until its request is looked up
again or the ids of the blocks are needed. Evictions are delayed until a place with content is read, because
then most of them remove whole runs.

A pin keeps a prefix for some time after its last use, for which clients pay (prompt caching of APIs). It owns
the runs of its prefix like a sequence, so they are evicted only after pin_s seconds without a use. All pins
together own at most max_blocks blocks; a prefix that does not fit is not pinned.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from itertools import pairwise
from typing import NamedTuple

from policies.caching.content import NAMELESS_PLACE, PRIVATE_PLACES, ContentListener, PathPart


class Run:
    """The blocks first to first + num_blocks - 1 of one place.

    number: its key among the free runs. owners: request ids of sequences, or negative numbers of pins ->
    their blocks. ids: physical ids of the blocks, once assigned. is_copy: whether another run offers these
    blocks.
    """

    __slots__ = ("first", "ids", "is_copy", "num_blocks", "number", "owners", "place")

    def __init__(
        self, number: int, place: int, first: int, num_blocks: int, ids: list[int], is_copy: bool = False
    ) -> None:
        self.number = number
        self.place = place
        self.first = first
        self.num_blocks = num_blocks
        self.ids = ids
        self.owners: dict[int, Holding] = {}
        self.is_copy = is_copy

    @property
    def end(self) -> int:
        """Number of the block after its last one."""
        return self.first + self.num_blocks


class Holding:
    """The blocks of a sequence (or pin), in order: runs, private blocks, and blocks without content."""

    __slots__ = ("found", "is_private", "num_private", "num_with_content", "path", "runs", "tail_ids")

    def __init__(self, path: list[PathPart]) -> None:
        self.path = path
        self.found: SequenceOf[tuple[Run, int]] = ()  # while it waits: (run, blocks) of the last lookup
        self.runs: list[Run] = []
        self.is_private = False  # whether all its blocks are private: num_private == num_with_content
        # Blocks at the path's last place without a run, because only this request can find them.
        self.num_private = 0
        self.num_with_content = 0  # blocks with content: in runs, and private
        self.tail_ids: list[int] = []  # ids of the blocks after them, as far as assigned

    def add(self, run: Run, owner: int) -> None:
        """Adds a run to the blocks of the owner."""
        run.owners[owner] = self
        self.runs.append(run)
        self.num_with_content += run.num_blocks


class Runs:
    """All runs of a pool.

    free_ids: list of the pool to which the ids of evicted blocks are added. on_evict: called before an
    eviction with a free run and the number of its last blocks that are evicted.
    """

    def __init__(self, free_ids: list[int], on_evict: Callable[[Run, int], None] | None = None) -> None:
        self.num_pending_evictions = 0  # blocks with a delayed eviction
        self._free_ids = free_ids
        self.on_evict = on_evict
        self._num_made = 0
        self._free: OrderedDict[int, Run | int] = OrderedDict()
        """Free blocks in the order in which they became free: number -> run, place -> private blocks."""
        self._offered: dict[int, list[Run]] = {}  # place -> the runs offered there, by their first block
        self._copies: dict[int, list[Run]] = {}  # place -> copies, in the order of their creation

    @property
    def next_free(self) -> Run:
        """The free run that is evicted next; it must not be a number of private blocks."""
        run = next(iter(self._free.values()))
        assert isinstance(run, Run)
        return run

    @property
    def places(self) -> set[int]:
        """Places with content, after performing all pending evictions."""
        self.evict_pending()
        return self._offered.keys() | self._copies.keys()

    def is_new_private(self, place: int) -> bool:
        """Returns whether a place is private and has no content."""
        return place >= PRIVATE_PLACES and place not in self._offered and place not in self._free

    def find(self, path: list[PathPart], limit: int) -> tuple[SequenceOf[tuple[Run, int]], int]:
        """Looks up a path: returns the offered runs at its beginning with the usable blocks of each.

        The second result is the number of these blocks, at most `limit`.
        """
        offered = self._offered
        if not path or (path[0][0] not in offered and path[0][0] not in self._free):
            return (), 0
        self.evict_pending()
        if path[-1][0] in self._free:
            self._make_free_run(path[-1][0])
        found: list[tuple[Run, int]] = []
        num_found = 0
        for place, end in path:
            wanted = (end if end < limit else limit) - num_found
            runs = offered.get(place)
            if runs is None:
                break
            run = runs[0]
            if run.num_blocks == wanted and not run.first and num_found + wanted < limit:  # the common case
                found.append((run, wanted))
                num_found += wanted
                continue
            next_block = 0
            for run in runs:
                if run.first != next_block or next_block == wanted:
                    break
                num_blocks = wanted - next_block
                if run.num_blocks < num_blocks:
                    num_blocks = run.num_blocks
                next_block += num_blocks
                found.append((run, num_blocks))
            num_found += next_block
            if next_block < wanted or num_found == limit:
                break
        return found, num_found

    def hold_found(self, held: Holding, owner: int) -> int:
        """Adds an owner to the runs of its last lookup; returns how many of their blocks were free."""
        num_free = num_with_content = 0
        runs, free = held.runs, self._free
        for run, num_blocks in held.found:
            if num_blocks < run.num_blocks:
                run = self._split(run, num_blocks)
            if not run.owners:
                del free[run.number]
                num_free += num_blocks
            run.owners[owner] = held
            runs.append(run)
            num_with_content += num_blocks
        held.num_with_content += num_with_content
        held.found = ()
        return num_free

    def share(self, held: Holding, owner: int, num_blocks: int) -> Holding:
        """Adds `owner` as a second owner of the first num_blocks blocks with content of `held`."""
        other = Holding(held.path)
        while other.num_with_content < num_blocks:
            run = held.runs[len(other.runs)]
            num_missing = num_blocks - other.num_with_content
            other.add(self._split(run, num_missing) if run.num_blocks > num_missing else run, owner)
        return other

    def extend(self, held: Holding, owner: int, place: int, first: int, end: int) -> None:
        """Offers blocks like `offer`, but extends the last run of the place if possible.

        That run must end at `first` and have no other owner. The blocks of a new private place are only
        counted.
        """
        num_blocks = end - first
        runs = self._offered.get(place)
        is_new = not (first or runs or held.tail_ids or place in self._free)
        if held.num_private or (is_new and place >= PRIVATE_PLACES and place == held.path[-1][0]):
            held.num_private += num_blocks
            held.num_with_content += num_blocks
            return
        if runs is not None and not held.tail_ids:
            run = runs[-1]
            if run.end == first and len(run.owners) == 1 and owner in run.owners and not run.ids:
                run.num_blocks += num_blocks
                held.num_with_content += num_blocks
                return
        self.offer(held, owner, place, first, end)

    def offer(self, held: Holding, owner: int, place: int, first: int, end: int) -> None:
        """Creates runs of a place's blocks first to end - 1, as copies where blocks are already offered.

        held.tail_ids must have all or none of the blocks' ids.
        """
        self.evict_pending()
        if place in self._free:
            self._make_free_run(place)
        offered = self._offered.setdefault(place, [])
        index = len(offered)
        while index and offered[index - 1].end > first:
            index -= 1
        while first < end:
            other = offered[index] if index < len(offered) else None
            is_copy = other is not None and other.first <= first
            upto = end if other is None else min(end, other.end if is_copy else other.first)
            ids, held.tail_ids = held.tail_ids[: upto - first], held.tail_ids[upto - first :]
            run = Run(self._new_number(), place, first, upto - first, ids, is_copy)
            held.add(run, owner)
            if is_copy:
                self._copies.setdefault(place, []).append(run)
            else:
                offered.insert(index, run)
            index += 1
            first = upto

    def keep_nameless(self, num_blocks: int) -> None:
        """Adds free blocks with content that no request can find; they are evicted before all others."""
        self._free[NAMELESS_PLACE] = num_blocks

    def make_private_run(self, held: Holding, owner: int) -> None:
        """Creates a run of the private blocks of an owner."""
        if held.num_private:
            place = held.path[-1][0]
            run = Run(place, place, 0, held.num_private, [])
            run.owners[owner] = held
            held.runs.append(run)
            held.num_private = 0
            held.is_private = False
            self._offered[place] = [run]

    def owners_after(self, held: Holding, num_blocks: int) -> set[int]:
        """Returns the owners of the blocks with content of `held` after the first num_blocks ones."""
        owners: set[int] = set()
        end = held.num_with_content - held.num_private
        for run in reversed(held.runs):
            if end <= num_blocks:
                break
            owners.update(run.owners)
            end -= run.num_blocks
        return owners

    def withdraw(self, held: Holding, num_blocks: int) -> None:
        """Removes the content of all blocks after the first num_blocks; they must have no other owner."""
        num_dropped = min(held.num_private, held.num_with_content - num_blocks)
        held.num_private -= num_dropped
        held.num_with_content -= num_dropped
        while held.num_with_content > num_blocks:
            run = held.runs[-1]
            assert len(run.owners) == 1, "a block to withdraw has another owner"
            num_dropped = min(run.num_blocks, held.num_with_content - num_blocks)
            held.num_with_content -= num_dropped
            if num_dropped == run.num_blocks:
                held.runs.pop()
            self._drop_last(run, num_dropped)

    def release(self, held: Holding, owner: int) -> int:
        """Removes an owner from its runs, the last run first; returns the number of freed blocks."""
        free = self._free
        num_free = held.num_private
        if num_free:
            free[held.path[-1][0]] = num_free
        for run in reversed(held.runs):
            owners = run.owners
            del owners[owner]
            if not owners:
                free[run.number] = run
                num_free += run.num_blocks
        return num_free

    def evict_pending(self) -> None:
        """Performs pending evictions: runs go in the order in which they became free, from their ends."""
        if self.num_pending_evictions:
            self.evict_whole_runs()
        if not self.num_pending_evictions:
            return
        number, run = next(iter(self._free.items()))
        if isinstance(run, int):
            self._free[number] = run - self.num_pending_evictions
        else:
            self._evict(run, self.num_pending_evictions)
        self.num_pending_evictions = 0

    def evict_whole_runs(self) -> None:
        """Performs the pending evictions that remove whole runs."""
        free, num_pending_evictions = self._free, self.num_pending_evictions
        while num_pending_evictions:
            number, run = next(iter(free.items()))
            num_blocks = run if isinstance(run, int) else run.num_blocks
            if num_blocks > num_pending_evictions:
                break
            num_pending_evictions -= num_blocks
            if not isinstance(run, int):
                self._evict(run, num_blocks)
            del free[number]
        self.num_pending_evictions = num_pending_evictions

    def check_integrity(self, owned: set[Run]) -> tuple[int, int]:
        """Asserts that `owned` are the runs with owners; returns the numbers of free and owned blocks.

        There must be no pending evictions.
        """
        runs = {run for offered in self._offered.values() for run in offered}
        copies = {run for copies in self._copies.values() for run in copies}
        assert all(not run.is_copy for run in runs)
        assert all(run.is_copy for run in copies)
        free = {run for run in self._free.values() if not isinstance(run, int)}
        assert owned | free == runs | copies, "a run is lost"
        assert not owned & free, "a run is owned and free"
        assert not self._free.keys() & self._offered.keys() - {run.number for run in free}, (
            "private blocks are also a run"
        )
        for offered in self._offered.values():
            assert offered
            assert all(one.end <= other.first for one, other in pairwise(offered))
        num_free = sum(run if isinstance(run, int) else run.num_blocks for run in self._free.values())
        return num_free, sum(run.num_blocks for run in owned)

    def _new_number(self) -> int:
        """Returns a new negative key for a run, because the keys of private blocks are their places."""
        self._num_made += 1
        return -self._num_made

    def _make_free_run(self, place: int) -> None:
        """Creates a run of free private blocks, because their request is looked up again."""
        num_blocks = self._free[place]
        if isinstance(num_blocks, int):
            self._free[place] = run = Run(place, place, 0, num_blocks, [])
            self._offered[place] = [run]

    def _evict(self, run: Run, num_blocks: int) -> None:
        """Evicts the last blocks of a free run."""
        if self.on_evict is not None:
            self.on_evict(run, num_blocks)
        self._drop_last(run, num_blocks)

    def _split(self, run: Run, num_blocks: int) -> Run:
        """Splits a run after num_blocks blocks; returns them as a new run. The given run keeps the rest."""
        head = Run(self._new_number(), run.place, run.first, num_blocks, run.ids[:num_blocks], run.is_copy)
        head.owners = dict(run.owners)
        for owner in run.owners.values():
            runs = owner.runs
            runs.insert(runs.index(run), head)
        same_kind = (self._copies if run.is_copy else self._offered)[run.place]
        same_kind.insert(same_kind.index(run), head)
        run.first += num_blocks
        run.num_blocks -= num_blocks
        run.ids = run.ids[num_blocks:]
        if not run.owners:  # the head is evicted right after the rest: ends go before beginnings
            self._free[head.number] = head
            if run.is_copy:
                behind = list(self._free)
                for other in behind[behind.index(run.number) + 1 : -1]:
                    self._free.move_to_end(other)
        return head

    def _drop_last(self, run: Run, num_blocks: int) -> None:
        """Removes the last blocks of a run from the cache."""
        run.num_blocks -= num_blocks
        if run.ids:
            self._free_ids.extend(reversed(run.ids[run.num_blocks :]))
            del run.ids[run.num_blocks :]
        place = run.place
        if not run.num_blocks:
            by_place = self._copies if run.is_copy else self._offered
            same_kind = by_place[place]
            if len(same_kind) == 1:
                del by_place[place]
            else:
                same_kind.remove(run)
        if place in self._copies and not run.is_copy:
            self._promote(place, run.end, run.end + num_blocks)

    def _promote(self, place: int, first: int, end: int) -> None:
        """Offers copies, the oldest first, of the blocks first to end - 1, which are no longer offered."""
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
            offered = self._offered.setdefault(place, [])
            offered.insert(sum(other.first < first for other in offered), run)
            first = upto


class ReportingRuns(Runs):
    """Runs that report each block of a place when it is offered and when it is lost.

    A copy is not reported, neither when it is created nor when it replaces the offered block.
    """

    def __init__(
        self, free_ids: list[int], listener: ContentListener, on_evict: Callable[[Run, int], None] | None
    ) -> None:
        super().__init__(free_ids, on_evict)
        self._listener = listener
        self._has_offered = False  # whether `offer` was called since the last `extend`

    def extend(self, held: Holding, owner: int, place: int, first: int, end: int) -> None:
        position = held.num_with_content
        self._has_offered = False
        super().extend(held, owner, place, first, end)
        if not self._has_offered and not held.num_private:
            self._report(owner, position, place, first, end)

    def offer(self, held: Holding, owner: int, place: int, first: int, end: int) -> None:
        super().offer(held, owner, place, first, end)
        self._has_offered = True
        position = held.num_with_content - (end - first)
        for run in _last_of(held, end - first):
            if not run.is_copy:
                self._report(owner, position, place, run.first, run.end)
            position += run.num_blocks

    def _report(self, owner: int, position: int, place: int, first: int, end: int) -> None:
        if place < PRIVATE_PLACES:
            self._listener.stored(owner, position, [(place, block) for block in range(first, end)])

    def _drop_last(self, run: Run, num_blocks: int) -> None:
        is_copy, place, end = run.is_copy, run.place, run.end
        super()._drop_last(run, num_blocks)
        if is_copy or place >= PRIVATE_PLACES:
            return
        promoted = [(other.first, other.end) for other in self._offered.get(place, ())]
        lost = [
            (place, block)
            for block in reversed(range(end - num_blocks, end))
            if not any(first <= block < after for first, after in promoted)
        ]
        if lost:
            self._listener.removed(lost)


def _last_of(held: Holding, num_blocks: int) -> list[Run]:
    """Returns the last runs of a sequence, num_blocks blocks in total, in order."""
    index = len(held.runs)
    while num_blocks > 0:
        index -= 1
        num_blocks -= held.runs[index].num_blocks
    return held.runs[index:]


class PinnedTime(NamedTuple):
    """Durations for which the pinned prefixes of a pool were kept.

    expired_token_s: token-seconds of expired pins. kept: tokens, start and expiry of each other pin.
    """

    expired_token_s: float = 0.0
    kept: tuple[tuple[int, float, float], ...] = ()

    def token_s_until(self, end_s: float) -> float:
        """Computes the token-seconds of all pins up to end_s."""
        return self.expired_token_s + sum(
            num_tokens * (min(end_s, until_s) - since_s) for num_tokens, since_s, until_s in self.kept
        )


class Pin:
    """A prefix that is kept until until_s even if no sequence uses it."""

    __slots__ = ("held", "number", "since_s", "until_s")

    def __init__(self, number: int, held: Holding, since_s: float) -> None:
        self.number = number  # below 0, so that it differs from request ids
        self.held = held
        self.since_s = since_s
        self.until_s = since_s


class Pins:
    """The pins of a pool, in the order of their last use and therefore of their expiry."""

    def __init__(self, *, pin_s: float, max_blocks: int, block_size: int) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0
        """Number of pinned blocks."""
        self._pin_s = pin_s
        self._block_size = block_size
        self._pins: OrderedDict[tuple[int, int], Pin] = OrderedDict()  # place, blocks -> pin
        self._num_made = 0
        self._token_s = 0.0  # token-seconds of pins that have expired

    @property
    def runs(self) -> Iterator[Run]:
        """The runs of all pins."""
        return (run for pin in self._pins.values() for run in pin.held.runs)

    @property
    def expires_s(self) -> float:
        """Time at which the next pin expires, in seconds; infinite without pins."""
        return next(iter(self._pins.values())).until_s if self._pins else float("inf")

    def keep(self, runs: Runs, held: Holding, num_blocks: int, now: float) -> bool:
        """Pins the first num_blocks blocks of a sequence or extends their pin; returns false without room."""
        place = next((place for place, end in held.path if end >= num_blocks), -1)
        pin = self._pins.get((place, num_blocks))
        if pin is None:
            if not 0 < num_blocks <= self.max_blocks - self.num_blocks:
                return False
            self._num_made += 1
            number = -self._num_made
            pin = Pin(number, runs.share(held, number, num_blocks), now)
            self._pins[place, num_blocks] = pin
            self.num_blocks += num_blocks
        pin.until_s = now + self._pin_s
        self._pins.move_to_end((place, num_blocks))
        return True

    def pop_expired(self, now: float) -> Pin | None:
        """Removes and returns the next pin if it has expired; else returns None."""
        if self.expires_s > now:
            return None
        _, pin = self._pins.popitem(last=False)
        self.num_blocks -= pin.held.num_with_content
        self._token_s += self._num_tokens(pin) * (pin.until_s - pin.since_s)
        return pin

    def time(self) -> PinnedTime:
        """Returns how long prefixes were kept so far, and their expiry times."""
        kept = ((self._num_tokens(pin), pin.since_s, pin.until_s) for pin in self._pins.values())
        return PinnedTime(self._token_s, tuple(kept))

    def check_integrity(self) -> None:
        """Asserts that each pin is an owner of its runs."""
        pins = self._pins.values()
        assert all(run.owners[pin.number] is pin.held for pin in pins for run in pin.held.runs)
        assert sum(pin.held.num_with_content for pin in pins) == self.num_blocks <= self.max_blocks

    def _num_tokens(self, pin: Pin) -> int:
        return pin.held.num_with_content * self._block_size
