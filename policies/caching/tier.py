"""A memory tier below the GPU: its contents, their eviction order, and a variant that reports changes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Set
from collections.abc import Sequence as SequenceOf

from policies.caching.content import PRIVATE_PLACES, ContentListener
from policies.core.plan import Content, Transfer

Piece = tuple[int, int, int]
"""Blocks of a place: (place, first block, block after the last). A plain tuple, for speed."""


class Tier:
    """The contents of one tier, at most num_blocks blocks, by place."""

    def __init__(self, name: str, num_blocks: int) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self.num_used = 0
        self._at: OrderedDict[int, list[tuple[int, int]]] = OrderedDict()
        """Place -> its ranges [first, end) of blocks; the least recently used place is first."""

    @property
    def places(self) -> set[int]:
        """Places with contents."""
        return set(self._at)

    def reach(self, place: int, first: int) -> int:
        """Returns the block up to which the tier has all blocks of a place from `first` on."""
        for one, end in self._at.get(place, ()):
            if one <= first < end:
                return end
        return first

    def reach_back(self, place: int, end: int) -> int:
        """Returns the block from which on the tier has all blocks of a place up to `end`."""
        for first, one in self._at.get(place, ()):
            if first < end <= one:
                return first
        return end

    def missing(self, place: int, first: int, end: int) -> list[tuple[int, int]]:
        """Returns the ranges among the blocks first to end - 1 of a place that the tier does not have."""
        missing = []
        for one, other in self._at.get(place, ()):
            if first < min(one, end):
                missing.append((first, min(one, end)))
            first = max(first, other)
        return [*missing, (first, end)] if first < end else missing

    def drop(self, place: int, first: int, end: int) -> None:
        """Drops the blocks first to end - 1 of a place, as far as the tier has them."""
        held = self._at.get(place, [])
        kept = [part for f, e in held for part in ((f, min(e, first)), (max(f, end), e)) if part[0] < part[1]]
        self.num_used -= sum(e - f for f, e in held) - sum(e - f for f, e in kept)
        if kept:
            self._at[place] = kept
        elif held:
            del self._at[place]

    def touch(self, place: int) -> None:
        """Marks a place as the most recently used."""
        if place in self._at:
            self._at.move_to_end(place)

    def put(self, place: int, first: int, end: int) -> tuple[int, list[Piece]]:
        """Stores blocks that the tier does not have; returns their number and the evicted ranges."""
        held = self._at.get(place)
        if held is None:
            self._at[place] = [(first, end)]
            num_new = end - first
        else:
            self._at.move_to_end(place)
            num_new = _merge(held, first, end)
            if not num_new:
                return 0, []
        self.num_used += num_new
        return num_new, self._evict() if self.num_used > self.num_blocks else []

    def _evict(self) -> list[Piece]:
        evicted: list[Piece] = []
        while (num_over := self.num_used - self.num_blocks) > 0:
            place, held = next(iter(self._at.items()))
            first, end = held.pop()
            start = max(first, end - num_over)
            if start > first:
                held.append((first, start))
            elif not held:
                del self._at[place]
            self.num_used -= end - start
            evicted.append((place, start, end))
        return evicted


class ReportingTier(Tier):
    """A tier that reports stored and lost contents."""

    def __init__(self, name: str, num_blocks: int, listener: ContentListener) -> None:
        super().__init__(name, num_blocks)
        self._listener = listener

    def put(self, place: int, first: int, end: int) -> tuple[int, list[Piece]]:
        if place < PRIVATE_PLACES:
            for one, other in self.missing(place, first, end):
                self._listener.stored_below(self.name, [(place, block) for block in range(one, other)])
        return super().put(place, first, end)

    def drop(self, place: int, first: int, end: int) -> None:
        for one, other in self._at.get(place, []):
            self._report_loss(place, max(one, first), min(other, end))
        super().drop(place, first, end)

    def _evict(self) -> list[Piece]:
        evicted = super()._evict()
        for piece in evicted:
            self._report_loss(*piece)
        return evicted

    def _report_loss(self, place: int, first: int, end: int) -> None:
        if place < PRIVATE_PLACES and first < end:
            names = [(place, block) for block in reversed(range(first, end))]
            self._listener.removed_below(self.name, names)


def _merge(held: list[tuple[int, int]], first: int, end: int) -> int:
    """Adds the range first to end - 1 to sorted, disjoint ranges; returns the number of new blocks."""
    if len(held) == 1:  # the common case, because ends are evicted before beginnings
        f, e = held[0]
        if f <= first and end <= e:
            return 0
        if first <= e and f <= end:
            held[0] = (min(f, first), max(e, end))
            return max(f - first, 0) + max(end - e, 0)
    num_before = sum(e - f for f, e in held)
    merged: list[tuple[int, int]] = []
    for f, e in sorted([*held, (first, end)]):
        if merged and f <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(e, merged[-1][1]))
        else:
            merged.append((f, e))
    held[:] = merged
    return sum(e - f for f, e in held) - num_before


NOWHERE = "nowhere"


class TierLedger:
    """Compares the contents of the tiers with the transfers requested so far.

    tiers: the tier nearest to the GPU first.

    A ledger of the blocks that an executor holds in the tiers below the GPU, and of the transfers between
    them.

    While a step is planned, a `TieredPool` adds contents to its tiers and evicts contents, sometimes the same
    ones. An executor that copies bytes gets the net difference once per plan, block by block. Contents that
    are added before the step that computes them (write=through) are copied with the next plan; their blocks
    are not overwritten before that.
    """

    def __init__(self, tiers: SequenceOf[Tier], block_size: int) -> None:
        self._tiers = tiers
        self._block_size = block_size
        self._held: dict[str, set[Content]] = {tier.name: set() for tier in tiers}
        self._changed: dict[Content, tuple[int, int]] = {}
        """Contents changed since the last `transfers` -> (GPU block, first iteration with the content).

        Block 0: the block is unknown.
        """

    def written(self, piece: Piece, ids: SequenceOf[int], ready: int, now: int) -> None:
        """Records that a piece is copied from the GPU blocks `ids` to the first tier.

        ready: iteration from which on the blocks have the contents. now: number of committed iterations.
        """
        place, first, end = piece
        for one, other in self._tiers[0].missing(place, first, end):
            for block in range(one, other):
                known_id, known_ready = self._changed.get((place, block), (0, 0))
                if not known_id or known_ready > now:
                    self._changed[place, block] = ids[block - first], ready

    def evicted(self, pieces: Iterable[Piece]) -> None:
        """Records that pieces were evicted from a tier, possibly to the next one."""
        for place, first, end in pieces:
            for block in range(first, end):
                self._changed.setdefault((place, block), (0, 0))

    def transfers(self, read: Set[tuple[str, Content]], now: int) -> tuple[list[Transfer], list[Transfer]]:
        """Returns the copies and evictions before the loads of the contents `read`, and the evictions after.

        now: number of committed iterations.
        """
        ways: dict[tuple[str, str], list[tuple[Content, int]]] = {}
        later: dict[str, list[Content]] = {}
        postponed: dict[Content, tuple[int, int]] = {}
        for content, (block, ready) in self._changed.items():
            source = "gpu"
            for tier in self._tiers:
                held = self._held[tier.name]
                is_there, is_counted = content in held, tier.reach(*content) > content[1]
                is_read = (tier.name, content) in read
                if is_there and not is_counted and not is_read:
                    ways.setdefault((tier.name, NOWHERE), []).append((content, 0))
                    held.remove(content)
                elif not is_there and (is_counted or is_read):
                    if source == "gpu" and ready > now:
                        postponed[content] = block, ready
                    else:
                        assert source != "gpu" or block, "no tier and no block holds this content"
                        ways.setdefault((source, tier.name), []).append((content, block))
                        held.add(content)
                if is_read and not is_counted:
                    later.setdefault(tier.name, []).append(content)
                    held.remove(content)
                if is_there:
                    source = tier.name
        self._changed = postponed
        before = [self._transfer(*way, ways[way]) for way in self._order() if way in ways]
        after = [self._transfer(name, NOWHERE, [(content, 0) for content in later[name]]) for name in later]
        return before, after

    def _order(self) -> list[tuple[str, str]]:
        """Returns the order of transfers, from the last tier up, so that a tier evicts before it receives."""
        names = [tier.name for tier in self._tiers]
        order = []
        for depth in reversed(range(len(names))):
            order += [(names[depth], NOWHERE), *((names[above], names[depth]) for above in range(depth))]
        return order + [("gpu", name) for name in reversed(names)]

    def _transfer(self, source: str, target: str, moved: list[tuple[Content, int]]) -> Transfer:
        blocks = tuple(block for _, block in moved) if source == "gpu" else ()
        contents = tuple(content for content, _ in moved)
        return Transfer(None, source, target, len(moved) * self._block_size, blocks, contents)
