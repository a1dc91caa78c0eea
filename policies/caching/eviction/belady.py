"""Belady's MIN: evicts the entry with the latest next use (Belady, IBM Systems Journal 1966).

This is an offline bound: it needs the order of all requests, so no engine can use it. With entries of one
size it has the fewest misses of all orders: an entry is never used later than those after it on its path, so
evicting leaves only is no restriction. With entries of several sizes, as in a radix tree, it is a reference
and not a proven bound. It assumes that requests are served in the order of arrival; an engine that reorders
them deviates from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.caching.eviction import Entry, Eviction


@dataclass(frozen=True, kw_only=True, slots=True)
class Belady(Eviction):
    """Belady's order. The cache must be given the future requests (`future.FutureUses`)."""

    is_offline: ClassVar[bool] = True

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: the latest next use first, then the deepest, then the oldest."""
        return -entry.next_use, -entry.depth, entry.inserted
