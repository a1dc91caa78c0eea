"""First in, first out: the oldest entry goes first, used or not. SGLang's `fifo`.

Assumes nothing about reuse; a baseline. Where a radix tree splits a node, its front half counts as new.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.caching.eviction import Entry, Eviction


@dataclass(frozen=True, kw_only=True, slots=True)
class Fifo(Eviction):
    """First in, first out; there are no settings."""

    def key(self, entry: Entry) -> tuple[float, ...]:
        """Sort key: the oldest first."""
        return (entry.inserted,)
