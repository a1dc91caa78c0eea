r"""S3-FIFO: a small queue that most content leaves soon, and a main queue with further chances.

After Yang et al., SOSP 2023. All queues are first in, first out.

    new content ---> small ---> evicted, its id remembered
                       | used twice or more                      \ comes back while it is remembered
                       v                                          v
                     main  ---> evicted, if not used; else it joins main again, with one use less

Uses are counted up to 3, in 2 bits, from the time at which an entry joined small or came to main from there.
The paper's pseudo-code goes on to evict from the small queue when a promotion has just pushed an entry out of
a full main queue; here the eviction ends with the first evicted entry.

Assumes that most content is used once, and that content which is used again is used soon. In a radix tree a
use is a request that passes through. A locked node keeps its place in its queue. The front half of a node
that is split joins its queue anew, at the time at which it becomes a leaf, with as many uses as it has had
since it was made, up to 3.
Memory pressure: the small queue gives while it holds its share or more, else the main queue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Self

from policies.caching.eviction import Entry, Eviction
from policies.caching.eviction.ghosts import Ghosts

SMALL, MAIN = 0, 1
MAX_USES = 3
"""Maximum number of uses that are counted: what 2 bits hold."""
PROMOTING_USES = 2
"""Number of uses in the small queue that promote an entry to the main one."""


class _Joined(NamedTuple):
    """The position at which an entry joined its queue, and its hits when it had no uses yet."""

    position: int
    hits: int


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Fifo(Eviction):
    """Settings of S3-FIFO, and its memory of the entries of one cache."""

    num_queues: ClassVar[int] = 2

    small_share: float = 0.1
    """Share of the cached tokens below which the small queue is spared."""
    ghost_share: float = 0.9
    """Tokens of evicted content that is remembered, as a share of the cached tokens: as many as in main."""
    _joined: dict[int, _Joined] = field(
        init=False, hash=False, repr=False, compare=False, default_factory=dict
    )
    """Data of all entries that are not evicted, by `inserted`."""
    _num_joins: list[int] = field(
        init=False, hash=False, repr=False, compare=False, default_factory=lambda: [0]
    )
    _ghosts: Ghosts = field(init=False, hash=False, repr=False, compare=False, default_factory=Ghosts)

    def __post_init__(self) -> None:
        if not 0 <= self.small_share <= 1:
            raise ValueError(f"small_share={self.small_share}: must be >= 0 and <= 1 (a share)")
        if not 0 <= self.ghost_share < float("inf"):
            raise ValueError(f"ghost_share={self.ghost_share}: must be >= 0 and finite")

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Sort key: the position in its queue."""
        return (self._joined_of(entry).position,)

    def fresh(self) -> Self:
        """Returns the same settings with an empty memory."""
        return replace(self)

    def admit(self, entry: Entry) -> int:
        """Remembered content joins the main queue, all other content the small one."""
        self._join(entry, entry.hits)
        return MAIN if self._ghosts.recall(entry.content_id) else SMALL

    def victim_queue(self, queue_tokens: Sequence[int]) -> int:
        """The small queue while it holds its share or more, else the main one."""
        has_share = queue_tokens[SMALL] >= self.small_share * sum(queue_tokens)
        return SMALL if has_share else MAIN

    def reprieve(self, entry: Entry) -> int | None:
        """Moves an entry with enough uses from small to main.

        Keeps an entry with uses in main, with one less.
        """
        num_uses = min(MAX_USES, entry.hits - self._joined_of(entry).hits)
        if entry.queue == SMALL and num_uses >= PROMOTING_USES:
            self._join(entry, entry.hits)
            return MAIN
        if entry.queue == MAIN and num_uses:
            self._join(entry, entry.hits - (num_uses - 1))
            return MAIN
        return None

    def evicted(self, entry: Entry, key: tuple[float, ...], queue_tokens: Sequence[int]) -> None:
        """Remembers the id of content that left the small queue."""
        del self._joined[entry.inserted]
        if entry.queue == SMALL:
            limit = self.ghost_share * (sum(queue_tokens) + entry.num_tokens)
            self._ghosts.remember(entry.content_id, entry.num_tokens, limit)

    def _join(self, entry: Entry, hits: int) -> None:
        self._num_joins[0] += 1
        self._joined[entry.inserted] = _Joined(self._num_joins[0], hits)

    def _joined_of(self, entry: Entry) -> _Joined:
        if entry.inserted not in self._joined:  # it was made by a split; its first hit was no use
            self._join(entry, 1)
        return self._joined[entry.inserted]
