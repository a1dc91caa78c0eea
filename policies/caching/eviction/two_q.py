"""2Q, full version: new content is on probation before it joins the main queue.

After Johnson and Shasha, VLDB 1994. New entries join a first-in-first-out queue. Content that comes back
after it left that queue, while its id is still remembered (as a ghost), joins the main queue, which is LRU. A
scan of content that is used once therefore passes through the probation queue and leaves the main queue
alone. Uses during probation do not count: they are regarded as one burst.

Memory pressure: probation gives while it holds more than its share, else the main queue. The ids of ghosts
take no KV memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

from policies.caching.eviction import Entry, Eviction
from policies.caching.eviction.ghosts import Ghosts

PROBATION, MAIN = 0, 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TwoQ(Eviction):
    """Settings of 2Q (the paper's Kin and Kout), and the ghosts of one cache."""

    num_queues: ClassVar[int] = 2

    probation_share: float = 0.25
    """Share of the cached tokens up to which the probation queue is spared."""
    ghost_share: float = 0.5
    """Tokens of evicted content that is remembered, as a share of the cached tokens."""
    _ghosts: Ghosts = field(init=False, hash=False, repr=False, compare=False, default_factory=Ghosts)

    def __post_init__(self) -> None:
        if not 0 <= self.probation_share <= 1:
            raise ValueError(f"probation_share={self.probation_share}: must be >= 0 and <= 1 (a share)")
        if not 0 <= self.ghost_share < float("inf"):
            raise ValueError(f"ghost_share={self.ghost_share}: must be >= 0 and finite")

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Sort key: first in, first out on probation; least recently used in the main queue."""
        if entry.queue == PROBATION:
            return (entry.inserted,)
        return entry.last_access, -entry.depth, entry.inserted

    def fresh(self) -> Self:
        """Returns the same settings without ghosts."""
        return replace(self)

    def admit(self, entry: Entry) -> int:
        """Remembered content joins the main queue, all other content the probation queue."""
        return MAIN if self._ghosts.recall(entry.content_id) else PROBATION

    def victim_queue(self, queue_tokens: Sequence[int]) -> int:
        """The probation queue while it holds more than its share, else the main one."""
        over = queue_tokens[PROBATION] > self.probation_share * sum(queue_tokens)
        return PROBATION if over else MAIN

    def evicted(self, entry: Entry, key: tuple[float, ...], queue_tokens: Sequence[int]) -> None:
        """Remembers content that left probation; forgets the oldest ids beyond the ghosts' share."""
        if entry.queue == PROBATION:
            limit = self.ghost_share * (sum(queue_tokens) + entry.num_tokens)
            self._ghosts.remember(entry.content_id, entry.num_tokens, limit)
