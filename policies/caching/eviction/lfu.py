"""Least frequently used first; among equals the least recently used. SGLang's `lfu`.

Assumes that popularity is stable: counts never decay, so content that was popular once is kept for long
(`SizeAware` ages its counts). Evicted content that is inserted again starts with a count of one.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.caching.eviction import Entry, Eviction


@dataclass(frozen=True, kw_only=True, slots=True)
class Lfu(Eviction):
    """Least frequently used; there are no settings."""

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: hits, then as `Lru`."""
        return entry.hits, entry.last_access, -entry.depth, entry.inserted
