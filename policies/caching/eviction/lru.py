"""Least recently used first: the default of vLLM and SGLang.

Assumes that recently used content will be used again. Of the entries that one request used at the same time,
the deepest is evicted first, so that a prefix remains.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.caching.eviction import Entry, Eviction


@dataclass(frozen=True, kw_only=True, slots=True)
class Lru(Eviction):
    """Least recently used; there are no settings."""

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: last access, then the deepest first, then age."""
        return entry.last_access, -entry.depth, entry.inserted
