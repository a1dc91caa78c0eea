"""A memory tier (`tier.py`) with a listener to its contents."""

from __future__ import annotations

from policies.caching.content import PRIVATE_PLACES, ContentListener
from policies.caching.tier import Piece, Tier


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
