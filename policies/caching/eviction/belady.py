"""Belady's MIN: evicts what will be used last (Belady, IBM Systems Journal 1966). An offline bound.

It is given the order of all requests, so no engine can run it. With entries of one size it has the fewest
misses that any order can have: an entry is never used later than the ones behind it on its path, so the rule
that only leaves are evicted does not bind. With entries of several sizes, as in a radix tree, it is a
reference and no proven bound. It takes requests in the order of arrival; an engine that reorders them departs
from it.
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
        """Sort key: the furthest next use first, then the deepest, then the oldest."""
        return -entry.next_use, -entry.depth, entry.inserted
