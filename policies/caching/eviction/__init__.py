"""Eviction orders: which cached entry is evicted first when KV memory is needed. One order per file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, Self


class Entry(Protocol):
    """A cached entry as an order may read it. Stamps count cache operations; they are no times."""

    @property
    def last_access(self) -> int:
        """Stamp of the last match or insert that touched the entry."""

    @property
    def inserted(self) -> int:
        """Stamp of its creation. No two entries of a cache share one, so every key ends in it."""

    @property
    def hits(self) -> int:
        """Number of inserts that made the entry or passed through it: about one per request that used it."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that its eviction frees."""

    @property
    def depth(self) -> int:
        """Number of tokens in front of its first one."""

    @property
    def priority(self) -> int:
        """The highest priority that an insert through it has carried; larger stays longer."""

    @property
    def queue(self) -> int:
        """The queue that `Eviction.admit` returned when the entry was made."""

    @property
    def content_id(self) -> int:
        """A hash of the tokens up to the entry's first: the same when the same content comes back."""

    @property
    def next_use(self) -> float:
        """Index of the next request that will use it, inf if none; only an offline replay knows it."""


class Eviction(Protocol):
    """An order of eviction. Every method except `key` has a default that fits an order without memory."""

    __slots__ = ()

    is_offline: ClassVar[bool] = False
    """Whether the order needs to know the future, so that no engine can run it."""
    num_queues: ClassVar[int] = 1

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Sort key, smallest evicted first; compared only with keys of the same queue.

        Called before the next eviction when the entry became a candidate or was touched.
        """
        ...

    def fresh(self) -> Self:
        """Returns the order with an empty memory; a cache takes it for itself."""
        return self

    def admit(self, entry: Entry) -> int:
        """The queue that a new entry joins, 0 to num_queues - 1."""
        return 0

    def victim_queue(self, queue_tokens: Sequence[int]) -> int:
        """The queue to take the next victim from; if it has no candidate, the others follow in order.

        queue_tokens: tokens held in each queue, locked and inner entries included.
        """
        return 0

    def reprieve(self, entry: Entry) -> int | None:
        """Called for the entry to be evicted: returns the queue that it joins anew instead; None.

        It is evicted.
        Its key is computed again then, and `victim_queue` called again. No entry may be spared for ever.
        """
        return None

    def evicted(self, entry: Entry, key: tuple[float, ...], queue_tokens: Sequence[int]) -> None:
        """Called after every eviction. key: the key of the entry; queue_tokens: tokens per queue after it."""
        return None
