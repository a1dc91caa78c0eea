"""The waiting queue: the sequences without KV, in the order of their rank."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from policies.core.sequence import Sequence
from policies.core.sequence_view import SequenceView


class WaitingQueue:
    """A heap by (rank, request id). Iteration follows that order and allows removing the yielded sequence.

    Iteration takes O(log n) for a caller that stops at the first sequence it cannot admit; otherwise the rest
    is sorted. An entry removed from the middle stays in the heap, invalid, until it is at the top.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, int, SequenceView]] = []  # rank, id, push, sequence
        self._push_of: dict[int, int] = {}  # request id -> number of the valid push
        self._num_pushes = 0

    def __len__(self) -> int:
        return len(self._push_of)

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, Sequence) and seq.request_id in self._push_of

    def push(self, seq: SequenceView) -> None:
        """Queues a sequence after those of smaller rank."""
        self._num_pushes += 1
        self._push_of[seq.request_id] = self._num_pushes
        heappush(self._heap, (seq.rank, seq.request_id, self._num_pushes, seq))

    def remove(self, seq: SequenceView) -> None:
        """Removes a sequence. Raises KeyError if it is not here."""
        heap, push_of = self._heap, self._push_of
        del push_of[seq.request_id]
        while heap and push_of.get(heap[0][1]) != heap[0][2]:  # keep a valid entry at the top
            heappop(heap)

    def __iter__(self) -> Iterator[SequenceView]:
        heap, push_of = self._heap, self._push_of
        while heap:
            first = heap[0]
            yield first[3]
            if heap and heap[0] is first:  # it was not removed, and the caller continues
                for entry in sorted(heap)[1:]:
                    if push_of.get(entry[1]) == entry[2]:
                        yield entry[3]
                return
