"""Requests that were sent to a replica and have not reached its engine yet.

A request reaches the engine when the API server has parsed, tokenised and forwarded it: see
`sim.engine.frontend`. An engine that plans ahead (asynchronous scheduling) has then already planned the step
after the running iteration, so the plan after that one is the first that includes the request:

    known        next boundary      boundary after it
      |-- iteration --|---- iteration ----| plan includes the request    plans_ahead=True
      |-- iteration --| plan includes the request                        plans_ahead=False

The first request wakes an idle engine that plans ahead; others that arrive at the same time are not in that
plan.

SGLang's scheduler can save host time (`--scheduler-recv-interval`): it looks for requests after every
iteration with prompt tokens and while it is idle, but only after every n-th iteration that decodes. With n=30
and decodes of 20 ms, a request waits 0.3 s on average before the scheduler knows it. SGLang begins to count
anew after each look; here the engine looks at the multiples of n of its iterations. The distribution of the
wait is the same for requests that arrive at random.
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
"""Adds a request to the engine; its argument is a `Sequence` or a `Migrant`."""


class Pending(NamedTuple):
    """A request on its way to the engine; requests enter in the order of (known_s, number)."""

    known_s: float
    """Time at which it reaches the engine, s."""
    number: int
    request: Request
    enter: Enter
    item: Any
    """The argument of `enter`."""
    sent_s: float | None
    """Time at which another replica transferred it, s; None: it came from the gateway."""


_NEW_PENDING: Final[Callable[..., Pending]] = partial(tuple.__new__, Pending)  # faster: runs no Python code


class Intake:
    """The pending requests of one replica, in the order of the times at which they reach the engine.

    plans_ahead: whether the engine plans a step before the running one has ended. on_enter is called with
    each request that reaches the engine. interval: the engine looks for requests at every n-th iteration of
    decodes. num_iterations: returns the number of iterations that it has committed.
    """

    __slots__ = (
        *("_interval", "_num_iterations", "_num_sent", "_on_enter", "_pending", "next_s", "plans_ahead"),
    )

    def __init__(
        self,
        plans_ahead: bool,
        on_enter: Callable[[Pending], None],
        interval: int = 1,
        num_iterations: Callable[[], int] = int,
    ) -> None:
        self.plans_ahead = plans_ahead
        self._on_enter = on_enter
        self._interval, self._num_iterations = interval, num_iterations
        self.next_s = inf
        """Time at which the first pending request reaches the engine, s; inf: none is pending."""
        self._pending: deque[Pending] = deque()
        self._num_sent = 0

    def add(
        self, known_s: float, request: Request, enter: Enter, item: Any, sent_s: float | None = None
    ) -> None:
        """Adds a pending request; enter(item) will add it to the engine at known_s. sent_s: see `Pending`."""
        self._num_sent += 1
        pending = self._pending
        entry = _NEW_PENDING((known_s, self._num_sent, request, enter, item, sent_s))
        if known_s >= self.next_s and known_s < pending[-1].known_s:
            insort(pending, entry)
        elif known_s < self.next_s:
            self.next_s = known_s
            pending.appendleft(entry)
        else:
            pending.append(entry)

    def enter_during(self, step: RunningStep) -> None:
        """Enters the requests that have reached the engine before the end of a step, in the order of time.

        Those of an engine that does not look then stay pending.
        """
        if self._interval > 1 and self._num_until_look(step, step.num_iterations) != step.num_iterations:
            return
        known_until_s = step.last_start_s if self.plans_ahead else step.end_s
        while self.next_s <= known_until_s and self.next_s < step.end_s:
            self._enter()

    def enter_at(self, now: float, is_idle: bool) -> None:
        """Enters the requests that have reached an engine between two steps.

        An engine that plans ahead enters the first of them if it is idle, else none.
        """
        if self._interval > 1 and not is_idle and self._num_iterations() % self._interval:
            return
        if self.plans_ahead:
            if is_idle:
                self._enter()
            return
        while self.next_s <= now:
            self._enter()

    def enter_alone(self, entry: Pending) -> None:
        """Enters one pending request, also ahead of others."""
        pending = self._pending
        pending.remove(entry)
        self.next_s = pending[0].known_s if pending else inf
        self._on_enter(entry)

    def _enter(self) -> None:
        """Removes the first pending request and enters it."""
        pending = self._pending
        entry = pending.popleft()
        self.next_s = pending[0].known_s if pending else inf
        self._on_enter(entry)

    def find(self, request_id: int) -> Pending | None:
        """Returns a pending request; None if it is not pending."""
        return next((entry for entry in self._pending if entry.request.request_id == request_id), None)

    def __contains__(self, request_id: int) -> bool:
        """Returns whether a request is pending."""
        return self.find(request_id) is not None

    def entries(self) -> list[Pending]:
        """Returns all pending requests, in order."""
        return list(self._pending)

    def clear(self) -> None:
        """Removes all pending requests."""
        self._pending.clear()
        self.next_s = inf

    def num_iterations_before(self, step: RunningStep) -> int:
        """Returns the number of iterations until a plan includes the first pending request."""
        known_s = self.next_s
        num_iterations = 1
        if known_s > step.start_s:
            num_iterations = bisect_left(step.ends_s, known_s) + (2 if self.plans_ahead else 1)
        return num_iterations if self._interval == 1 else self._num_until_look(step, num_iterations)

    def _num_until_look(self, step: RunningStep, num_iterations: int) -> int:
        """Returns after how many iterations of a step, at least num_iterations, the engine looks."""
        if step.plan.chunks:
            return num_iterations
        return num_iterations + -(self._num_iterations() + num_iterations) % self._interval
