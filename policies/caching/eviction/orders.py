"""Orders of eviction without state: a key says which entry is evicted first. SGLang's `lru`, `lfu`, ...

LRU is the default of vLLM and SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.caching.eviction import Entry, Eviction


@dataclass(frozen=True, kw_only=True, slots=True)
class Lru(Eviction):
    """Least recently used first; there are no settings.

    Assumes that recently used content will be used again. Of the entries that one request used at the same
    time, the deepest is evicted first, so that a prefix remains.
    """

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: last access, then the deepest first, then age."""
        return entry.last_access, -entry.depth, entry.inserted


@dataclass(frozen=True, kw_only=True, slots=True)
class Lfu(Eviction):
    """Least frequently used first, among equals the least recently used; there are no settings.

    Assumes that popularity is stable: counts never decay, so content that was popular once is kept for long
    (`SizeAware` ages its counts). Evicted content that is inserted again starts with a count of one.
    """

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: hits, then as `Lru`."""
        return entry.hits, entry.last_access, -entry.depth, entry.inserted


@dataclass(frozen=True, kw_only=True, slots=True)
class Fifo(Eviction):
    """First in, first out: evicts the oldest entry, used or not; there are no settings.

    Assumes nothing about reuse; a baseline. If a radix tree splits a node, its first half counts as new.
    """

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: the oldest first."""
        return (entry.inserted,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Priority(Eviction):
    """Lowest priority first, among equals the least recently used; there are no settings.

    Assumes that clients set priorities truthfully. An entry keeps the highest priority of the inserts through
    it, so that a shared prefix has the priority of its most important request.
    """

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: priority, then as `Lru`."""
        return entry.priority, entry.last_access, -entry.depth, entry.inserted


@dataclass(frozen=True, kw_only=True, slots=True)
class Belady(Eviction):
    """Belady's MIN: evicts the entry with the latest next use (Belady, IBM Systems Journal 1966).

    This is an offline bound: it needs the order of all requests, so no engine can use it, and the cache must
    be given them (`future.FutureUses`). With entries of one size it has the fewest misses of all orders: an
    entry is never used later than those after it on its path, so evicting leaves only is no restriction. With
    entries of several sizes, as in a radix tree, it is a reference and not a proven bound. It assumes that
    requests are served in the order of arrival; an engine that reorders them deviates from it.
    """

    is_offline: ClassVar[bool] = True

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: the latest next use first, then the deepest, then the oldest."""
        return -entry.next_use, -entry.depth, entry.inserted
