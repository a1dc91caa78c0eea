"""Timers of sequences, at which a scheduling policy considers them again."""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from policies.core.sequence import SequenceState
from policies.core.sequence_view import SequenceView


class Alarms:
    """A heap of timers by (time, request id). They are not cancelled: the policy must check each one."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int, SequenceView]] = []  # time, request id, number, sequence
        self._num_set = 0

    def set(self, due_s: float, seq: SequenceView) -> None:
        """Sets a timer for a sequence at due_s."""
        self._num_set += 1
        heappush(self._heap, (due_s, seq.request_id, self._num_set, seq))

    def pop_due(self, now: float) -> list[SequenceView]:
        """Removes the timers due by now; returns their sequences in order, except those that have ended."""
        due = []
        while self.next_s <= now:
            due.append(heappop(self._heap)[3])
        return due

    @property
    def next_s(self) -> float:
        """Time of the next timer in seconds; infinite if there is none."""
        heap = self._heap
        while heap and heap[0][3].state is SequenceState.ended:
            heappop(heap)
        return heap[0][0] if heap else inf
