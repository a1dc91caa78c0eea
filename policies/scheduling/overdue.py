"""Bounds the wait of requests: those that have waited max_wait_s are served before all others.

A scheduling policy considers sequences again at the times of their timers (`Alarms`).
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf

from policies.core.sequence import SequenceState, SequenceView
from policies.core.step import StepBuilder
from policies.core.view import StepView


class Overdue:
    """Requests that were waiting max_wait_s after their arrival; a request stays overdue until it ends.

    A policy calls `rank` for its ranks, `bring_forward` in `before_step`, and `forget` in `on_end`.
    A later request is not admitted before a waiting overdue one, so a request is overtaken only by requests
    that arrive within max_wait_s after it.
    """

    def __init__(self) -> None:
        self._ids: set[int] = set()
        self._alarms = Alarms()
        self._watched: set[int] = set()  # ids with a pending alarm

    def rank(self, seq: SequenceView, max_wait_s: float | None, *key: float) -> tuple[float, ...]:
        """Returns the sort key, (0, arrival) if overdue, else (1, *key, arrival), and sets a timer."""
        arrival_s, request_id = seq.request.arrival_s, seq.request_id
        if request_id in self._ids:
            return (0, arrival_s)
        if max_wait_s is not None and seq.state is SequenceState.waiting and request_id not in self._watched:
            self._watched.add(request_id)
            self._alarms.set(arrival_s + max_wait_s, seq)
        return (1, *key, arrival_s)

    def bring_forward(self, view: StepView, step: StepBuilder, now: float) -> None:
        """Moves overdue requests to the front; the step holds until the next request could be overdue."""
        for seq in self._alarms.pop_due(now):
            self._watched.discard(seq.request_id)
            if seq.state is SequenceState.waiting:  # else it is ranked when it waits again
                self._ids.add(seq.request_id)
                step.rerank(seq)
        if view.num_waiting:
            step.hold(until_s=self._alarms.next_s)

    def forget(self, seq: SequenceView) -> None:
        """Removes a sequence that has ended."""
        self._ids.discard(seq.request_id)
        self._watched.discard(seq.request_id)


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
