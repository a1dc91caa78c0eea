"""Finds waiting requests whose prefix another waiting request will compute first (SGLang, in-batch caching).

Of requests that share a prefix which is not cached, one is served first, and the others then find its KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from policies.caching.content import all_segments
from policies.core.request import Segment
from policies.core.sequence_view import SequenceView

NUM_TOKENS = 32
"""A hit of at most so many tokens counts as none, and a shared prefix counts from so many tokens on."""

Prefix = tuple[Segment, ...]


class SharedPrefixes:
    """The first tokens of waiting requests, by request id."""

    def __init__(self) -> None:
        self._prefixes: dict[int, Prefix] = {}

    def behind(self, queue: Sequence[SequenceView], hits: Mapping[int, int]) -> set[int]:
        """Returns the ids of the requests that share a prefix with one before them in the queue.

        hits: cached tokens by request id. A request with a hit neither waits nor lets others wait.
        """
        behind, found = set[int](), set[Prefix]()
        for seq in queue:
            if hits[seq.request_id] > NUM_TOKENS or seq.num_known < NUM_TOKENS:
                continue
            prefix = self._prefixes.get(seq.request_id)
            if prefix is None:
                prefix = self._prefixes[seq.request_id] = _prefix(seq)
            if prefix in found:
                behind.add(seq.request_id)
            found.add(prefix)
        return behind

    def forget(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._prefixes.pop(seq.request_id, None)


def _prefix(seq: SequenceView) -> Prefix:
    """Returns the segments of the first `NUM_TOKENS` tokens, which are equal for equal tokens."""
    prefix, num_left = [], NUM_TOKENS
    for content_id, num_tokens in islice(all_segments(seq.request), NUM_TOKENS):
        prefix.append(Segment(content_id, min(num_tokens, num_left)))
        num_left -= num_tokens
        if num_left <= 0:
            break
    return tuple(prefix)
