"""The next uses of content by future requests, for offline bounds such as Belady's.

A position in a prompt is identified by its history, a hash of the whole segments before it, and the content
id of its segment.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from policies.core.request import Segment

NO_HISTORY = 0


def extend_history(history: int, segments: Iterable[Segment]) -> int:
    """Returns the history after further segments; it is equal in every process."""
    for content_id, num_tokens in segments:
        history = hash((history, content_id, num_tokens))
    return history


class FutureUses:
    """The future requests by the positions that they use. now: index of the last request that has begun."""

    def __init__(self, prompts: Sequence[tuple[Segment, ...]]) -> None:
        """Records all requests. prompts: the segments of each, in the order of arrival."""
        self.now = -1
        self._uses: defaultdict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for index, segments in enumerate(prompts):
            history = NO_HISTORY
            for segment in segments:
                indices, lengths = self._uses[history, segment[0]]
                indices.append(index)
                lengths.append(segment[1])
                history = extend_history(history, (segment,))

    def begin(self, index: int) -> None:
        """Records that request `index` and all before it have begun and are no longer future uses."""
        self.now = max(self.now, index)

    def next_use(self, history: int, content_id: int, num_tokens: int) -> float:
        """Returns the index of the next request with at least num_tokens tokens of a segment; inf if none."""
        indices, lengths = self._uses.get((history, content_id), ((), ()))
        for i in range(bisect_right(indices, self.now), len(indices)):
            if lengths[i] >= num_tokens:
                return indices[i]
        return math.inf
