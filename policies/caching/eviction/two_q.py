"""2Q, full version: new content joins a probation queue before it can join the main queue.

Johnson and Shasha, VLDB 1994. New entries join a first-in-first-out probation queue. Content that is inserted
again after it was evicted from that queue, while it has a ghost entry, joins the main queue, which is LRU.
Content that is used only once therefore does not evict content of the main queue. Uses in the probation queue
are not counted; they are regarded as one burst.

Memory pressure: victims are taken from the probation queue while it has more than its share, else from main.
Ghost entries use no KV memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from fieldlimits import Checked, NonNegative, Share
from policies.caching.eviction import Entry, Eviction
from policies.caching.eviction.ghosts import Ghosts

PROBATION, MAIN = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoQ(Checked, Eviction):
    """Settings of 2Q (Kin and Kout in the paper), and the ghost entries of one cache."""

    num_queues: ClassVar[int] = 2

    probation_share: Share = 0.25
    """Share of the cached tokens up to which nothing is evicted from the probation queue."""
    ghost_share: NonNegative = 0.5
    """Tokens of evicted content with a ghost entry, as a share of the cached tokens."""
    _ghosts: Ghosts = field(init=False, hash=False, repr=False, compare=False, default_factory=Ghosts)

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: first in, first out in the probation queue; as `Lru` in the main queue."""
        if entry.queue == PROBATION:
            return (entry.inserted,)
        return entry.last_access, -entry.depth, entry.inserted

    def fresh(self) -> Self:
        """Returns the same settings without ghost entries."""
        return replace(self)

    def admit(self, entry: Entry) -> int:
        """Returns the main queue for content with a ghost entry, else the probation queue."""
        return MAIN if self._ghosts.recall(entry.content_id) else PROBATION

    def victim_queue(self, queue_tokens: Sequence[int]) -> int:
        """Returns the probation queue while it has more than its share, else the main one."""
        over = queue_tokens[PROBATION] > self.probation_share * sum(queue_tokens)
        return PROBATION if over else MAIN

    def evicted(self, entry: Entry, key: tuple[float, ...], queue_tokens: Sequence[int]) -> None:
        """Stores the id of content that was evicted from the probation queue."""
        if entry.queue == PROBATION:
            limit = self.ghost_share * (sum(queue_tokens) + entry.num_tokens)
            self._ghosts.remember(entry.content_id, entry.num_tokens, limit)
