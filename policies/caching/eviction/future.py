"""Future uses of content: the order of all requests, for offline bounds such as Belady's.

A place in a prompt is identified by its history, a hash over the whole runs in front of it, and the id of the
run that it lies in.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from policies.core.request import Segment

NO_HISTORY = 0


def extend_history(history: int, runs: Iterable[Segment]) -> int:
    """The history behind `runs`, which stand behind `history`. The same in every process."""
    for content_id, num_tokens in runs:
        history = hash((history, content_id, num_tokens))
    return history


class FutureUses:
    """The future requests that use a place. `now` is the index of the last request that has begun."""

    def __init__(self, prompts: Sequence[tuple[Segment, ...]]) -> None:
        """prompts: the runs of every request, in the order of arrival."""
        self.now = -1
        self._uses: defaultdict[tuple[int, int], tuple[list[int], list[int]]] = defaultdict(lambda: ([], []))
        for index, runs in enumerate(prompts):
            history = NO_HISTORY
            for run in runs:
                indices, lengths = self._uses[history, run[0]]
                indices.append(index)
                lengths.append(run[1])
                history = extend_history(history, (run,))

    def begin(self, index: int) -> None:
        """Records that request `index` has begun: it is no future use any more. The index never goes back."""
        self.now = max(self.now, index)

    def next_use(self, history: int, content_id: int, num_tokens: int) -> float:
        """Index of the next request with num_tokens tokens or more of this run at this place; inf if none."""
        indices, lengths = self._uses.get((history, content_id), ((), ()))
        for i in range(bisect_right(indices, self.now), len(indices)):
            if lengths[i] >= num_tokens:
                return indices[i]
        return math.inf
