"""Which cached entry goes first when KV memory is needed. One order a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Protocol, Self


class Entry(Protocol):
    """What an order may know about an entry; read only. Stamps are counts of cache operations, no times."""

    @property
    def last_access(self) -> int:
        """Stamp of the last match or insert that touched the entry."""

    @property
    def inserted(self) -> int:
        """Stamp of its creation. No two entries of a cache share one, so every key ends in it."""

    @property
    def hits(self) -> int:
        """Inserts that made the entry or passed through it: about one for each request that used it."""

    @property
    def num_tokens(self) -> int:
        """Tokens that its eviction frees."""

    @property
    def depth(self) -> int:
        """Tokens in front of its first one."""

    @property
    def priority(self) -> int:
        """The highest priority that an insert through it has carried; larger stays longer."""

    @property
    def queue(self) -> int:
        """The queue that `Eviction.admit` named when the entry was made."""

    @property
    def content_id(self) -> int:
        """A hash of the tokens up to the entry's first: the same when the same content comes back."""

    @property
    def next_use(self) -> float:
        """Index of the next request that will ask for it, inf if none; only an offline replay knows it."""


class Eviction(Protocol):
    """An order of eviction. Derive from it: all but `key` has a default that fits an order without memory."""

    __slots__ = ()

    is_offline: ClassVar[bool] = False
    """Whether the order needs to know the future, so that no engine can run it."""
    num_queues: ClassVar[int] = 1

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Sort key, smallest evicted first; compared only with keys of the same queue.

        Asked for before the next eviction when the entry became a candidate or was touched.
        """
        ...

    def fresh(self) -> Self:
        """The order with nothing remembered: what a cache takes for itself."""
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
        """Asked of the entry that would go: the queue that it joins anew instead; None: it goes.

        Its key is taken again then, and `victim_queue` asked again. No entry may be spared for ever.
        """
        return None

    def evicted(self, entry: Entry, key: tuple[float, ...], queue_tokens: Sequence[int]) -> None:
        """Called after every eviction. key: the key of the entry; queue_tokens: tokens per queue after it."""
        return None
