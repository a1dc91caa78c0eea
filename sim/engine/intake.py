"""Requests that were sent to a replica and that its engine does not know yet.

A request reaches the engine `frontend_s` after it was sent: the API server reads, tokenises and passes it on.
An engine that plans ahead (asynchronous scheduling) has then already planned the step behind the running
iteration, so the plan after that one is the first that sees the request:

    known        next boundary      boundary behind it
      |-- iteration --|---- iteration ----| plan sees the request        plans_ahead
      |-- iteration --| plan sees the request                            not

An idle engine is woken by the first request; others of the same instant find its plan made.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from math import inf
from typing import NamedTuple

from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.engine.running_step import RunningStep


class Pending(NamedTuple):
    """A request on its way to the engine; requests enter in this order."""

    known_s: float
    """When it reaches the engine."""
    number: int
    request: Request
    enter: Callable[[], Sequence]
    """Gives it to the engine."""
    sent_s: float | None = None
    """When another replica handed it over; None: it came from the gateway."""


class Intake:
    """The pending requests of one replica, in the order of their times."""

    __slots__ = ("_first", "_num_sent", "_pending", "next_s", "plans_ahead")

    def __init__(self, plans_ahead: bool) -> None:
        self.plans_ahead = plans_ahead
        self.next_s = inf
        """When the first pending request reaches the engine."""
        self._pending: list[Pending] = []
        self._first = 0  # in the list: those before it have entered
        self._num_sent = 0

    def add(
        self, known_s: float, request: Request, enter: Callable[[], Sequence], sent_s: float | None = None
    ) -> None:
        """Expect a request at known_s."""
        self._num_sent += 1
        pending = self._pending
        entry = Pending(known_s, self._num_sent, request, enter, sent_s)
        if known_s >= self.next_s and known_s < pending[-1].known_s:
            insort(pending, entry, lo=self._first)
        elif known_s < self.next_s:
            self.next_s = known_s
            pending.insert(self._first, entry)
        else:
            pending.append(entry)

    def take(self) -> Pending:
        """Remove and return the first pending request."""
        entry = self._pending[self._first]
        self._first += 1
        if self._first == len(self._pending):
            self.clear()
        else:
            self.next_s = self._pending[self._first].known_s
            if self._first == 1024:
                del self._pending[:1024]
                self._first = 0
        return entry

    def __contains__(self, request_id: int) -> bool:
        """Whether a request is pending."""
        return any(entry.request.request_id == request_id for entry in self.entries())

    def entries(self) -> list[Pending]:
        """All pending requests, in order."""
        return self._pending[self._first :]

    def clear(self) -> None:
        """Forget all pending requests."""
        self._pending, self._first, self.next_s = [], 0, inf

    def num_iterations_before(self, step: RunningStep) -> int:
        """Iterations of a running step behind which the first pending request is planned for."""
        known_s = self.next_s
        if known_s <= step.start_s:
            return 1
        return bisect_left(step.ends_s, known_s) + (2 if self.plans_ahead else 1)
