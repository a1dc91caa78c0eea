"""First in, first out: evicts the oldest entry, used or not. SGLang's `fifo`.

Assumes nothing about reuse; a baseline. If a radix tree splits a node, its first half counts as new.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.caching.eviction import Entry, Eviction


@dataclass(frozen=True, kw_only=True, slots=True)
class Fifo(Eviction):
    """First in, first out; there are no settings."""

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Returns the sort key: the oldest first."""
        return (entry.inserted,)
