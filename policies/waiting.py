"""The queue of sequences without KV, in the order of their rank."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from policies.sequence import Sequence


class WaitingQueue:
    """A heap by (rank, request id). Iteration follows that order and allows popping what it yielded.

    A caller that stops at the first sequence it cannot admit pays O(log n); one that looks further pays for
    a sort of what is left.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, ...], int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, seq: Sequence) -> None:
        """Queue a sequence behind those of smaller rank."""
        heappush(self._heap, (seq._rank, seq.request_id, seq))

    def remove(self, seq: Sequence) -> None:
        """Take a sequence out: O(log n) if it is the first, else O(n). ValueError if it is not here."""
        heap = self._heap
        if heap and heap[0][2] is seq:
            heappop(heap)
            return
        heap.remove((seq._rank, seq.request_id, seq))
        heapify(heap)

    def __iter__(self) -> Iterator[Sequence]:
        heap = self._heap
        while heap:
            seq = heap[0][2]
            yield seq
            if heap and heap[0][2] is seq:  # not taken: the caller looks behind it
                yield from [entry[2] for entry in sorted(heap)[1:]]
                return
