"""The waiting queue: the sequences without KV, in the order of their rank."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from policies.core.sequence import Sequence
from policies.core.sequence_view import SequenceView


class WaitingQueue:
    """A heap by (rank, request id). Iteration follows that order and allows removing the yielded sequence.

    A caller that stops at the first sequence it cannot admit pays O(log n); one that looks further pays for
    a sort of the rest. An entry removed from the middle stays in the heap, invalid, until it surfaces.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, int, SequenceView]] = []  # rank, id, push, sequence
        self._push_of: dict[int, int] = {}  # by request id: the valid push
        self._num_pushes = 0

    def __len__(self) -> int:
        return len(self._push_of)

    def __contains__(self, seq: object) -> bool:
        return isinstance(seq, Sequence) and seq.request_id in self._push_of

    def push(self, seq: SequenceView) -> None:
        """Queues a sequence behind those of smaller rank."""
        self._num_pushes += 1
        self._push_of[seq.request_id] = self._num_pushes
        heappush(self._heap, (seq.rank, seq.request_id, self._num_pushes, seq))

    def remove(self, seq: SequenceView) -> None:
        """Removes a sequence. Raises KeyError if it is not here."""
        heap, push_of = self._heap, self._push_of
        del push_of[seq.request_id]
        while heap and push_of.get(heap[0][1]) != heap[0][2]:  # keep a live entry at the top, if there is one
            heappop(heap)

    def __iter__(self) -> Iterator[SequenceView]:
        heap, push_of = self._heap, self._push_of
        while heap:
            first = heap[0]
            yield first[3]
            if heap and heap[0] is first:  # not removed: the caller looks further
                for entry in sorted(heap)[1:]:
                    if push_of.get(entry[1]) == entry[2]:
                        yield entry[3]
                return
