"""The contents of a prefix cache, in runs: consecutive blocks at one place of `content.Places`.

Each block of a place is offered once. A sequence that computed the same contents side by side holds a copy,
which is offered when the offered block is evicted. Runs without a holder are free: they stay, in the order in
which they became free, until their blocks are needed.

    place 5    | 0 1 2 | 3 | 4 5 6 7 |      three runs offered, cut where a sequence used only a part
               | 0 1 |                      a copy

Costs grow with the number of runs, not with that of their blocks. Contents that only one request can name are
not even a run, but a number of blocks, until that request comes again or their ids are needed.
Evictions are delayed until a place with contents is read: most then take runs whole.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import pairwise

from policies.caching.content import PRIVATE_PLACES, PathPart


class Run:
    """A run of blocks with contents at one place: its blocks first to first + num_blocks - 1.

    number: its key among the free runs. owners: its holders: sequences by request id, pins by numbers below
    0. ids: physical blocks, once assigned. A copy is not offered: another run has the same contents.
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
        """The block behind its last."""
        return self.first + self.num_blocks


class Holding:
    """The blocks of a sequence, from the first on: runs, own blocks, and blocks without content yet."""

    __slots__ = ("found", "is_private", "num_private", "num_with_content", "path", "runs", "tail_ids")

    def __init__(self, path: list[PathPart]) -> None:
        self.path = path
        self.found: SequenceOf[tuple[Run, int]] = ()  # while it waits: result of the last lookup
        self.runs: list[Run] = []
        self.is_private = False  # whether num_private will count all its blocks
        self.num_private = (
            0  # blocks of the path's last place that are in no run: only its request can name them
        )
        self.num_with_content = 0  # blocks with contents: those in runs, and its own
        self.tail_ids: list[int] = []  # ids of the blocks behind them, as far as assigned

    def add(self, run: Run, owner: int) -> None:
        """Adds a run to the blocks held."""
        run.owners[owner] = self
        self.runs.append(run)
        self.num_with_content += run.num_blocks


class Runs:
    """All runs of a pool.

    free_ids: the list of the pool to which ids of evicted blocks are added. on_evict is called with a run
    without holder and the number of its last blocks that are about to be evicted.
    """

    def __init__(self, free_ids: list[int], on_evict: Callable[[Run, int], None] | None = None) -> None:
        self.num_pending_evictions = 0  # blocks whose eviction is delayed
        self._free_ids = free_ids
        self._on_evict = on_evict
        self._num_made = 0
        self._free: OrderedDict[int, Run | int] = OrderedDict()
        """Free blocks in the order in which they became free.

        Runs by number, counts of own blocks by place.
        """
        self._offered: dict[int, list[Run]] = {}  # place -> the runs offered there, by their first block
        self._copies: dict[int, list[Run]] = {}  # place -> runs not offered, in the order of their making

    @property
    def next_free(self) -> Run:
        """The free run that became free first."""
        run = next(iter(self._free.values()))
        assert isinstance(run, Run)
        return run

    @property
    def places(self) -> set[int]:
        """Places that have contents."""
        self.evict_pending()
        return self._offered.keys() | self._copies.keys()

    def is_new_private(self, place: int) -> bool:
        """Whether a place that only one request can name has no contents."""
        return place >= PRIVATE_PLACES and place not in self._offered and place not in self._free

    def find(self, path: list[PathPart], limit: int) -> tuple[SequenceOf[tuple[Run, int]], int]:
        """The runs with which a path begins, and the usable blocks of each, at most limit in all."""
        at = self._offered
        if not path or (path[0][0] not in at and path[0][0] not in self._free):
            return (), 0
        self.evict_pending()
        if path[-1][0] in self._free:
            self._make_free_run(path[-1][0])
        found: list[tuple[Run, int]] = []
        num_found = 0
        for place, end in path:
            wanted = (end if end < limit else limit) - num_found
            runs = at.get(place)
            if runs is None:
                break
            run = runs[0]
            if run.num_blocks == wanted and not run.first and num_found + wanted < limit:  # frequent
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
        """Holds the result of the last lookup. Returns the number of its blocks that were free until now."""
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
        """Adds a second owner of the first num_blocks blocks with contents of a holder."""
        other = Holding(held.path)
        while other.num_with_content < num_blocks:
            run = held.runs[len(other.runs)]
            num_missing = num_blocks - other.num_with_content
            other.add(self._split(run, num_missing) if run.num_blocks > num_missing else run, owner)
        return other

    def extend(self, held: Holding, owner: int, place: int, first: int, end: int) -> None:
        """Offers blocks like `offer`; extends the last run of the place if it ends at `first`.

        It is extended only if the owner alone holds it.
        """
        num_blocks = end - first
        offered = self._offered.get(place)
        is_new = not (first or offered or held.tail_ids or place in self._free)
        if held.num_private or (is_new and place >= PRIVATE_PLACES and place == held.path[-1][0]):
            held.num_private += num_blocks
            held.num_with_content += num_blocks
            return
        if offered is not None and not held.tail_ids:
            run = offered[-1]
            if run.end == first and len(run.owners) == 1 and owner in run.owners and not run.ids:
                run.num_blocks += num_blocks
                held.num_with_content += num_blocks
                return
        self.offer(held, owner, place, first, end)

    def offer(self, held: Holding, owner: int, place: int, first: int, end: int) -> None:
        """Makes runs of the place's blocks first to end - 1.

        They are copies where such blocks are offered already.
        held.tail_ids has all or none of their ids.
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

    def make_private_run(self, held: Holding, owner: int) -> None:
        """Makes a run of the blocks that only the owner's request can name."""
        if held.num_private:
            place = held.path[-1][0]
            run = Run(place, place, 0, held.num_private, [])
            run.owners[owner] = held
            held.runs.append(run)
            held.num_private = 0
            held.is_private = False
            self._offered[place] = [run]

    def owners_after(self, held: Holding, num_blocks: int) -> set[int]:
        """Owners of any but the first num_blocks blocks with contents that `held` holds."""
        owners: set[int] = set()
        end = held.num_with_content - held.num_private
        for run in reversed(held.runs):
            if end <= num_blocks:
                break
            owners.update(run.owners)
            end -= run.num_blocks
        return owners

    def withdraw(self, held: Holding, num_blocks: int) -> None:
        """Removes the contents from all but the first num_blocks blocks; they must have no other holder."""
        num_dropped = min(held.num_private, held.num_with_content - num_blocks)
        held.num_private -= num_dropped
        held.num_with_content -= num_dropped
        while held.num_with_content > num_blocks:
            run = held.runs[-1]
            assert len(run.owners) == 1, "somebody else holds what is withdrawn"
            num_dropped = min(run.num_blocks, held.num_with_content - num_blocks)
            held.num_with_content -= num_dropped
            if num_dropped == run.num_blocks:
                held.runs.pop()
            self._drop_last(run, num_dropped)

    def release(self, held: Holding, owner: int) -> int:
        """Releases all blocks; runs without other holders become free, the last first.

        Returns their blocks.
        """
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
        """Carries out delayed evictions.

        The run that became free first goes first, its tail before its head.
        """
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
        """Carries out those delayed evictions that take whole runs."""
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
        """Asserts that owned are the runs with holders. Returns the number of free and of held blocks."""
        self.evict_pending()
        runs = {run for offered in self._offered.values() for run in offered}
        copies = {run for copies in self._copies.values() for run in copies}
        assert all(not run.is_copy for run in runs)
        assert all(run.is_copy for run in copies)
        free = {run for run in self._free.values() if not isinstance(run, int)}
        assert owned | free == runs | copies, "a run is lost"
        assert not owned & free, "a run is held and free"
        assert not self._free.keys() & self._offered.keys() - {run.number for run in free}, (
            "own blocks are a run, too"
        )
        for offered in self._offered.values():
            assert offered
            assert all(one.end <= other.first for one, other in pairwise(offered))
        num_free = sum(run if isinstance(run, int) else run.num_blocks for run in self._free.values())
        return num_free, sum(run.num_blocks for run in owned)

    def _new_number(self) -> int:
        """A new key for a run: below 0, as those of own blocks are their places."""
        self._num_made += 1
        return -self._num_made

    def _make_free_run(self, place: int) -> None:
        """Makes a run of free blocks that only one request can name, as that request has come again."""
        num_blocks = self._free[place]
        if isinstance(num_blocks, int):
            self._free[place] = run = Run(place, place, 0, num_blocks, [])
            self._offered[place] = [run]

    def _evict(self, run: Run, num_blocks: int) -> None:
        """Evicts the last blocks of a free run."""
        if self._on_evict is not None:
            self._on_evict(run, num_blocks)
        self._drop_last(run, num_blocks)

    def _split(self, run: Run, num_blocks: int) -> Run:
        """Splits a run behind num_blocks blocks. Returns the head.

        The rest keeps its identity and position.
        """
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
        if not run.owners:  # the head goes right behind the rest: a tail goes before its head
            self._free[head.number] = head
            if run.is_copy:
                behind = list(self._free)
                for other in behind[behind.index(run.number) + 1 : -1]:
                    self._free.move_to_end(other)
        return head

    def _drop_last(self, run: Run, num_blocks: int) -> None:
        """Removes the last blocks of a run, whose contents are lost."""
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
        """Offers copies, the oldest first, of blocks that are no longer offered."""
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
