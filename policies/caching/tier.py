"""One tier of memory below the GPU's: its contents and their order of eviction; a tier that reports them."""

from __future__ import annotations

from collections import OrderedDict

from policies.caching.content import PRIVATE_PLACES, ContentListener

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
        """Stores blocks that the tier does not have; returns their number and the evicted pieces."""
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
    """A tier that reports what is stored in it and what it loses."""

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
    """Adds the range first to end - 1 to sorted, separate ranges; returns the number of new blocks."""
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
