"""Lowest priority first, among equals the least recently used. SGLang's `priority`.

Assumes that clients set priorities truthfully. An entry keeps the highest priority of the inserts through it,
so that a shared prefix has the priority of its most important request.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.caching.eviction import Entry, Eviction


@dataclass(frozen=True, kw_only=True, slots=True)
class Priority(Eviction):
    """Lowest priority first; there are no settings."""

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: priority, then as `Lru`."""
        return entry.priority, entry.last_access, -entry.depth, entry.inserted
