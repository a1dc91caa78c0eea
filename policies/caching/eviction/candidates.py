"""The entries that can be evicted now, in the order of an eviction policy: heaps with lazy deletion.

A use of an entry takes O(1): the entry is added to a list of entries that need a new key, and the list is
added to the heaps at the next eviction. An outdated item of a heap is recognised by its version and dropped
when it is at the top, so that an eviction takes O(log n) amortised.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from typing import Generic, Protocol, TypeVar

from policies.caching.eviction import Entry, Eviction


class Candidate(Entry, Protocol):
    """An entry of `Candidates`, which alone writes the last three attributes."""

    @property
    def is_candidate(self) -> bool:
        """True if it may be evicted now: it has no lock and no child, and is in the cache."""

    queue: int
    """Number of its queue; starts as 0."""
    version: int
    """Number of keys computed for it; starts as 0."""
    is_pending: bool
    """Whether it needs a new key; starts as False."""


C = TypeVar("C", bound=Candidate)
_MIN_SWEEP = 1024  # heap length below which outdated items are not removed


class Candidates(Generic[C]):
    """The candidates of one cache."""

    def __init__(self, eviction: Eviction) -> None:
        self.eviction = eviction.fresh()
        self.queue_tokens = [0] * self.eviction.num_queues
        """Number of tokens in each queue."""
        self._heaps: list[list[tuple[tuple[float, ...], int, int, C]]] = [[] for _ in self.queue_tokens]
        self._sweep_at = [_MIN_SWEEP] * len(self._heaps)
        self._pending: list[C] = []

    def admit(self, entry: C) -> None:
        """Adds a new entry, which need not be a candidate, to its queue."""
        entry.queue = self.eviction.admit(entry)
        self.queue_tokens[entry.queue] += entry.num_tokens

    def offer(self, entry: C) -> None:
        """Records that an entry became a candidate, or that a candidate's key may have changed."""
        if not entry.is_pending:
            entry.is_pending = True
            self._pending.append(entry)

    def pop(self) -> C | None:
        """Removes and returns the entry to evict, which the cache must then drop; None without candidates."""
        if self._pending:
            self._take_keys()
        while (first := self._pop_first()) is not None:
            entry, key = first
            queue = self.eviction.reprieve(entry)
            self.queue_tokens[entry.queue] -= entry.num_tokens
            if queue is None:
                self.eviction.evicted(entry, key, self.queue_tokens)
                return entry
            entry.queue = queue
            self.queue_tokens[queue] += entry.num_tokens
            self._push(entry)
        return None

    def holds(self, entry: C) -> bool:
        """Returns whether `pop` would return the entry at some time; O(n), for integrity checks."""
        return entry.is_pending or any(
            item is entry and version == entry.version for heap in self._heaps for _, _, version, item in heap
        )

    def _pop_first(self) -> tuple[C, tuple[float, ...]] | None:
        """Removes and returns the first candidate with its key, from the victim queue or a later one."""
        first = self.eviction.victim_queue(self.queue_tokens) if len(self._heaps) > 1 else 0
        for offset in range(len(self._heaps)):
            heap = self._heaps[(first + offset) % len(self._heaps)]
            while heap:
                key, _, version, entry = heappop(heap)
                if version == entry.version and entry.is_candidate:
                    return entry, key
        return None

    def _push(self, entry: C) -> None:
        entry.version += 1
        key = self.eviction.key(entry)
        # `inserted` and the version differ, so that two entries are never compared.
        heappush(self._heaps[entry.queue], (key, entry.inserted, entry.version, entry))

    def _take_keys(self) -> None:
        for entry in self._pending:
            entry.is_pending = False
            if entry.is_candidate:
                self._push(entry)
        self._pending.clear()
        for queue, heap in enumerate(self._heaps):
            if len(heap) > self._sweep_at[queue]:
                heap[:] = [item for item in heap if item[2] == item[3].version and item[3].is_candidate]
                heapify(heap)
                self._sweep_at[queue] = max(_MIN_SWEEP, 2 * len(heap))
