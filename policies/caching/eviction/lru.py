"""Least recently used first: the default of vLLM and SGLang.

Assumes that what was used lately will be used again. Of entries that one request touched together the deepest
goes first, so that what is left is a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.caching.eviction import Entry, Eviction


@dataclass(frozen=True, kw_only=True, slots=True)
class Lru(Eviction):
    """Least recently used; there are no settings."""

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Sort key: last access, deepest first, then age."""
        return entry.last_access, -entry.depth, entry.inserted
