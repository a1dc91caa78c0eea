"""The interface of eviction orders, which decide which cached entry is evicted first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, Self


class Entry(Protocol):
    """A cached entry as an order may read it. Stamps count cache operations; they are not times."""

    @property
    def last_access(self) -> int:
        """Stamp of the last match or insert that used the entry."""

    @property
    def inserted(self) -> int:
        """Stamp of its creation, unique in the cache; therefore every key ends with it."""

    @property
    def hits(self) -> int:
        """Number of inserts that created the entry or passed through it: about one per request."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens that its eviction frees."""

    @property
    def depth(self) -> int:
        """Number of tokens before its first one."""

    @property
    def priority(self) -> int:
        """The highest priority of the inserts through it; entries of larger priority are kept longer."""

    @property
    def queue(self) -> int:
        """The queue that `Eviction.admit` or `reprieve` returned for the entry."""

    @property
    def content_id(self) -> int:
        """Hash of the tokens up to the entry's first one, equal for equal content."""

    @property
    def next_use(self) -> float:
        """Index of the next request that uses it, inf if none; known only in an offline replay."""


class Eviction(Protocol):
    """An order of eviction. Every method except `key` has a default for orders without state."""

    __slots__ = ()

    is_offline: ClassVar[bool] = False
    """Whether the order needs the future requests, which no engine knows."""
    num_queues: ClassVar[int] = 1

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key of an entry: the smallest of its queue is evicted first.

        Is called before the next eviction after the entry became a candidate or was used.
        """
        ...

    def fresh(self) -> Self:
        """Returns a copy of the order without state; every cache uses its own."""
        return self

    def admit(self, entry: Entry) -> int:
        """Returns the queue that a new entry joins, 0 to num_queues - 1."""
        return 0

    def victim_queue(self, queue_tokens: Sequence[int]) -> int:
        """Returns the queue of the next victim; if it has no candidate, the other queues follow in order.

        queue_tokens: tokens in each queue, locked and inner entries included.
        """
        return 0

    def reprieve(self, entry: Entry) -> int | None:
        """Returns the queue that the entry to be evicted joins instead; None: it is evicted.

        If it joins a queue, its key is computed and `victim_queue` is called again. No entry may be spared
        without end.
        """
        return None

    def evicted(self, entry: Entry, key: tuple[float, ...], queue_tokens: Sequence[int]) -> None:
        """Is called after every eviction. key: the entry's key; queue_tokens: tokens per queue afterwards."""
        return None
