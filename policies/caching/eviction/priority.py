"""Lowest priority first, among equals the least recently used. SGLang's `priority`.

Assumes that clients rate their content honestly. An entry takes the highest priority inserted through it and
keeps it: a shared prefix is worth as much as its most important user.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.caching.eviction import Entry, Eviction


@dataclass(frozen=True, kw_only=True, slots=True)
class Priority(Eviction):
    """Lowest priority first; there are no settings."""

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Sort key: priority, then as `Lru`."""
        return entry.priority, entry.last_access, -entry.depth, entry.inserted
