r"""S3-FIFO: a small queue for new content, and a main queue in which used content is reinserted.

Yang et al., SOSP 2023. All queues are first in, first out.

    new content ---> small ---> evicted, its id is stored as a ghost
                       | used twice or more                      \ inserted again while it is a ghost
                       v                                          v
                     main  ---> evicted if not used; else reinserted into main with one use less

Uses are counted up to 3, in 2 bits, from the time at which an entry joined small or moved from small to main.
The pseudo-code of the paper continues to evict from the small queue when a promotion has evicted an entry
from a full main queue; here the eviction ends with the first evicted entry.

Assumes that most content is used once, and that content which is used again is used soon. In a radix tree a
use is a request that passes through the node. A locked node keeps its position in its queue. The first half
of a split node joins its queue again when it becomes a leaf, with its uses so far, up to 3.
Memory pressure: victims are taken from the small queue while it has its share or more, else from main.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple, Self

from fieldlimits import Checked, NonNegative, Share
from policies.caching.eviction import Entry, Eviction
from policies.caching.eviction.ghosts import Ghosts
from policies.caching.eviction.two_q import MAIN

SMALL = 0
"""Number of the queue of new content; the other is `MAIN`."""
MAX_USES = 3
"""Maximum number of counted uses (2 bits)."""
PROMOTING_USES = 2
"""Number of uses in the small queue that promote an entry to the main one."""


class _Joined(NamedTuple):
    """The position at which an entry joined its queue, and its hits at that time."""

    position: int
    hits: int


@dataclass(frozen=True, kw_only=True, slots=True)
class S3Fifo(Checked, Eviction):
    """Settings of S3-FIFO, and its state for one cache."""

    num_queues: ClassVar[int] = 2

    small_share: Share = 0.1
    """Share of the cached tokens below which nothing is evicted from the small queue."""
    ghost_share: NonNegative = 0.9
    """Tokens of evicted content with a ghost entry, as a share of the cached tokens; as many as in main."""
    _joined: dict[int, _Joined] = field(
        init=False, hash=False, repr=False, compare=False, default_factory=dict
    )
    """Data of the entries in the cache, by `inserted`."""
    _num_joins: list[int] = field(
        init=False, hash=False, repr=False, compare=False, default_factory=lambda: [0]
    )
    _ghosts: Ghosts = field(init=False, hash=False, repr=False, compare=False, default_factory=Ghosts)

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: the position in its queue."""
        return (self._joined_of(entry).position,)

    def fresh(self) -> Self:
        """Returns the same settings without state."""
        return replace(self)

    def admit(self, entry: Entry) -> int:
        """Returns the main queue for content with a ghost entry, else the small one."""
        self._join(entry, entry.hits)
        return MAIN if self._ghosts.recall(entry.content_id) else SMALL

    def victim_queue(self, queue_tokens: Sequence[int]) -> int:
        """Returns the small queue while it has its share or more, else the main one."""
        has_share = queue_tokens[SMALL] >= self.small_share * sum(queue_tokens)
        return SMALL if has_share else MAIN

    def reprieve(self, entry: Entry) -> int | None:
        """Moves an entry with enough uses from small to main, and reinserts an entry with uses into main."""
        num_uses = min(MAX_USES, entry.hits - self._joined_of(entry).hits)
        if entry.queue == SMALL and num_uses >= PROMOTING_USES:
            self._join(entry, entry.hits)
            return MAIN
        if entry.queue == MAIN and num_uses:
            self._join(entry, entry.hits - (num_uses - 1))
            return MAIN
        return None

    def evicted(self, entry: Entry, key: tuple[float, ...], queue_tokens: Sequence[int]) -> None:
        """Stores the id of content that was evicted from the small queue."""
        del self._joined[entry.inserted]
        if entry.queue == SMALL:
            limit = self.ghost_share * (sum(queue_tokens) + entry.num_tokens)
            self._ghosts.remember(entry.content_id, entry.num_tokens, limit)

    def _join(self, entry: Entry, hits: int) -> None:
        self._num_joins[0] += 1
        self._joined[entry.inserted] = _Joined(self._num_joins[0], hits)

    def _joined_of(self, entry: Entry) -> _Joined:
        if entry.inserted not in self._joined:  # it was created by a split; its first hit is not a use
            self._join(entry, 1)
        return self._joined[entry.inserted]
