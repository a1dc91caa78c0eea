"""Least recently used first: what vLLM and SGLang do by default.

Assumes that what was asked for lately will be asked for again. Of entries that one request touched together
the deepest goes first, so that what is left is a prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.caching.eviction import Entry, Eviction


@dataclass(frozen=True, kw_only=True, slots=True)
class Lru(Eviction):
    """Settings: none."""

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Last access, deepest first, then age."""
        return entry.last_access, -entry.depth, entry.inserted
