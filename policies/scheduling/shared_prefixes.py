"""Finds waiting requests whose prefix another waiting request will compute first (SGLang, in-batch caching).

Of requests that share a prefix which is not cached, one is served first, and the others then find its KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.caching.content import all_segments
from policies.caching.radix_tree import RadixTree
from policies.core.sequence_view import SequenceView

NUM_TOKENS = 32
"""A hit of at most so many tokens counts as none, and a shared prefix counts from so many tokens on."""


class SharedPrefixes:
    """The requests that should wait for another one; computed anew only when the queue has changed."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int]] = []  # (request id, known tokens) without a hit, as last computed
        self._behind: frozenset[int] = frozenset()

    def behind(self, queue: Sequence[SequenceView], hits: Mapping[int, int]) -> frozenset[int]:
        """Returns the ids of the requests that share a prefix with one before them in the queue.

        hits: cached tokens by request id. A request with a hit neither waits nor lets others wait.
        """
        without = [seq for seq in queue if hits[seq.request_id] <= NUM_TOKENS]
        seen = [(seq.request_id, seq.num_known) for seq in without]
        if seen != self._seen:
            self._seen, self._behind = seen, _behind(without)
        return self._behind


def _behind(queue: Sequence[SequenceView]) -> frozenset[int]:
    tree, behind = RadixTree(), set[int]()
    for seq in queue:
        segments = tuple(all_segments(seq.request))
        if tree.match(segments, seq.num_known).num_tokens >= NUM_TOKENS:
            behind.add(seq.request_id)
        else:
            tree.insert(segments, seq.num_known)
    return frozenset(behind)
