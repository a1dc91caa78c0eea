"""The blocks of a prefix cache (`runs.py`) with a listener to what is offered."""

from __future__ import annotations

from collections.abc import Callable

from policies.caching.content import PRIVATE_PLACES
from policies.caching.content_listener import ContentListener
from policies.caching.runs import Holding, Run, Runs


class ReportingRuns(Runs):
    """Runs that report each block of a place when it is offered and when it is lost.

    A copy is not reported, neither when it is made nor when it takes the place of the offered block.
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
    """Returns the last runs of a sequence, which have num_blocks blocks, in order."""
    index = len(held.runs)
    while num_blocks > 0:
        index -= 1
        num_blocks -= held.runs[index].num_blocks
    return held.runs[index:]
