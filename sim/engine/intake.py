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
from collections import deque
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, Final, NamedTuple

from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.engine.running_step import RunningStep

Enter = Callable[[Any], Sequence]
"""Gives a request to the engine, called with what stands for it: a sequence or a migrant."""


class Pending(NamedTuple):
    """A request on its way to the engine; requests enter in this order."""

    known_s: float
    """When it reaches the engine."""
    number: int
    request: Request
    enter: Enter
    what: Any
    sent_s: float | None
    """When another replica handed it over; None: it came from the gateway."""


_NEW_PENDING: Final[Callable[..., Pending]] = partial(tuple.__new__, Pending)  # without a call of Python code


class Intake:
    """The pending requests of one replica, in the order of their times.

    plans_ahead: whether the engine plans a step before the one that runs has ended. on_enter is called with
    each request that the engine knows from now on.
    """

    __slots__ = ("_num_sent", "_on_enter", "_pending", "next_s", "plans_ahead")

    def __init__(self, plans_ahead: bool, on_enter: Callable[[Pending], None]) -> None:
        self.plans_ahead = plans_ahead
        self._on_enter = on_enter
        self.next_s = inf
        """When the first pending request reaches the engine."""
        self._pending: deque[Pending] = deque()
        self._num_sent = 0

    def add(
        self, known_s: float, request: Request, enter: Enter, what: Any, sent_s: float | None = None
    ) -> None:
        """Expect a request at known_s, when enter(what) gives it to the engine. sent_s: see `Pending`."""
        self._num_sent += 1
        pending = self._pending
        entry = _NEW_PENDING((known_s, self._num_sent, request, enter, what, sent_s))
        if known_s >= self.next_s and known_s < pending[-1].known_s:
            insort(pending, entry)
        elif known_s < self.next_s:
            self.next_s = known_s
            pending.appendleft(entry)
        else:
            pending.append(entry)

    def enter_during(self, step: RunningStep) -> None:
        """Let in what the engine has come to know before the end of a step, in the order of time."""
        known_until_s = step.last_start_s if self.plans_ahead else step.end_s
        while self.next_s <= known_until_s and self.next_s < step.end_s:
            self._enter()

    def enter_at(self, now: float, is_idle: bool) -> None:
        """Let in what has come to an engine at rest; one that plans ahead is only woken, by the first."""
        if self.plans_ahead:
            if is_idle:
                self._enter()
            return
        while self.next_s <= now:
            self._enter()

    def _enter(self) -> None:
        """Remove the first pending request, and let it in."""
        pending = self._pending
        entry = pending.popleft()
        self.next_s = pending[0].known_s if pending else inf
        self._on_enter(entry)

    def __contains__(self, request_id: int) -> bool:
        """Whether a request is pending."""
        return any(entry.request.request_id == request_id for entry in self._pending)

    def entries(self) -> list[Pending]:
        """All pending requests, in order."""
        return list(self._pending)

    def clear(self) -> None:
        """Forget all pending requests."""
        self._pending.clear()
        self.next_s = inf

    def num_iterations_before(self, step: RunningStep) -> int:
        """Iterations of a running step behind which the first pending request is planned for."""
        known_s = self.next_s
        if known_s <= step.start_s:
            return 1
        return bisect_left(step.ends_s, known_s) + (2 if self.plans_ahead else 1)
