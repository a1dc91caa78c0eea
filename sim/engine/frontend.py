"""The way of a request into an engine: the API server's processes, then the intake of the scheduler.

The processes of the front end parse, tokenise, detokenise and stream. A request that reaches a replica waits
for one of `servers` processes in the order of arrival, is processed, and reaches the scheduler `frontend_s`
seconds later (inter-process latency, no work). The process that took a request also detokenises and streams
its answer:

    arrival | wait | request_s + prompt tokens x prompt_token_s | frontend_s | scheduler ... tokens
                                                                  output tokens x output_token_s

Departures are computed at arrival, without events (Lindley's recursion for each process). The work of an
answer arises evenly while it is generated, with about `token_gap_s` between tokens. The part of it that fits
into the process's idle time delays no request; the rest joins its queue when the answer ends. No work is
lost: with one process the rate is at most 1 / (request_s + p prompt_token_s + a output_token_s) requests/s.

Tokens are recorded when the engine produces them: gaps between tokens do not include delays in a busy
process.

A request reaches the engine when the API server has forwarded it; until then it is in the `Intake`. An engine
that plans ahead (asynchronous scheduling) has then already planned the step after the running iteration, so
the plan after that is the first to include the request:

    known        next boundary      boundary after it
      |-- iteration --|---- iteration ----| plan includes the request    plans_ahead=True
      |-- iteration --| plan includes the request                        plans_ahead=False

The first request wakes an idle engine that plans ahead; others that arrive at the same time are not in that
plan.

SGLang's scheduler can save host time (`--scheduler-recv-interval`): it checks for requests after every
iteration with prompt tokens and while idle, but only after every n-th decode iteration. With n=30 and decodes
of 20 ms, a request waits 0.3 s on average before the scheduler receives it. SGLang restarts its count after
each check; here the engine checks at multiples of n of its iterations. The distribution of the wait is the
same for requests that arrive at random.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import Annotated, Any, Final, NamedTuple

from fieldlimits import Checked, Ge, Le, NonNegative, Unit, check
from hwmodels.checks import check_finite
from policies.core.limits import StopAfter
from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.engine.iteration_times import RunningStep

MAX_SERVERS = 1_000
"""Most processes of a front end."""

TOKENS = 1_000
"""Prompt length at which a front end's idle time is given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontend(Checked):
    """The work of an engine's API server. The defaults are no work, so that no request waits."""

    servers: Annotated[int | None, Ge(1), Le(MAX_SERVERS)] = None
    """Processes (vLLM's --api-server-count); None: one; with vLLM, one per data-parallel rank."""
    request_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Seconds of work per request: HTTP, parsing, inter-process communication."""
    prompt_token_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Seconds of work per prompt token, cached or not: tokenisation."""
    output_token_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Seconds of work per output token: detokenisation and streaming."""
    range_s: tuple[float, float] | None = None
    """Range of the front end's measured idle latency, s; None: not measured."""

    def __post_init__(self) -> None:
        check(self)
        if self.range_s is not None:
            check_range("range_s", self.range_s)

    @property
    def works(self) -> bool:
        """True if its processes have any work, so that requests can wait for them."""
        return bool(self.request_s or self.prompt_token_s or self.output_token_s)


def check_range(name: str, range_s: tuple[float, float]) -> None:
    """Raises ValueError unless a range is two finite times in order, s."""
    if len(range_s) != 2:
        raise ValueError(f"{name}={list(range_s)}: must be two times, the least and the largest, in seconds")
    least, most = range_s
    for value in range_s:
        check_finite(name, value, unit="s", zero_allowed=True)
    if least > most:
        raise ValueError(f"{name}={list(range_s)}: must be the least and the largest time, in this order")


class FrontendQueue:
    """The queue of one replica's front end.

    latency_s: seconds between the end of the work and the request's arrival at the scheduler. token_gap_s:
    returns the time between two tokens of a single running answer, s.
    """

    __slots__ = (
        "_gap_s",
        "_latency_s",
        "_output_token_s",
        "_processes",
        "_prompt_token_s",
        "_request_s",
        "_token_gap_s",
        "taken_s",
    )

    def __init__(
        self, settings: Frontend, num_servers: int, latency_s: float, token_gap_s: Callable[[], float]
    ) -> None:
        self._request_s, self._prompt_token_s = settings.request_s, settings.prompt_token_s
        self._output_token_s = settings.output_token_s
        self._latency_s = latency_s
        self._token_gap_s = token_gap_s
        self._gap_s: float | None = None
        self._processes = [_Process() for _ in range(num_servers)]
        self.taken_s: dict[int, float] = {}
        """Seconds from arrival to scheduler, by request id, for requests that no plan has included yet."""

    def reset(self) -> None:
        """Replaces its processes by idle ones, after a crash."""
        self._processes = [_Process() for _ in self._processes]
        self.taken_s.clear()

    def known_s(self, now: float, request: Request, stop_after: StopAfter) -> float:
        """Accepts a request that arrives now; returns the time at which it reaches the scheduler, s.

        stop_after: output tokens after which it ends.
        """
        processes = self._processes
        process = processes[0] if len(processes) == 1 else min(processes, key=_free_s)
        free_s, owed = process.free_s, process.owed
        if owed and owed[0][0] <= (now if now > free_s else free_s):
            process.pay(now)
            free_s = process.free_s
        if now > free_s:
            process.idle_s += now - free_s
            free_s = now
        free_s += self._request_s + self._prompt_token_s * request.prompt.num_tokens
        process.free_s = free_s
        if self._output_token_s:
            if isinstance(stop_after, int) and request.branching is None:
                num_tokens = longest = stop_after
            else:
                num_tokens, longest = _answer(request, stop_after)
            gap_s = self._gap_s
            if gap_s is None:
                gap_s = self._gap_s = self._token_gap_s()
            heappush(owed, (free_s + longest * gap_s, num_tokens * self._output_token_s, process.idle_s))
        known_s = free_s + self._latency_s
        self.taken_s[request.request_id] = known_s - now
        return known_s


def _answer(request: Request, stop_after: StopAfter) -> tuple[int, int]:
    """Returns the output tokens of a request and of its longest branch."""
    if isinstance(stop_after, tuple):
        return sum(stop_after), max(stop_after)
    longest = (request.max_tokens or 0) if stop_after is None else stop_after
    return longest * (1 if request.branching is None else request.branching.width), longest


class _Process:
    """One process: when it becomes free, its idle time, and the work of unfinished answers.

    idle_s: sum of its idle times until free_s. owed: a heap of (end of an answer, its work, idle_s at its
    start), s.
    """

    __slots__ = ("_idle_used_s", "free_s", "idle_s", "owed")

    def __init__(self) -> None:
        self.free_s = self.idle_s = 0.0
        self._idle_used_s = 0.0  # idle time up to which the work of answers has been done
        self.owed: list[tuple[float, float, float]] = []

    def pay(self, now: float) -> None:
        """Adds the remaining work of answers that end by now, or before the process becomes free."""
        owed, free_s = self.owed, self.free_s
        while owed and owed[0][0] <= (now if now > free_s else free_s):
            due_s, answer_s, idle_s = heappop(owed)
            if due_s > free_s:
                self.idle_s += due_s - free_s
                free_s = due_s
            if self._idle_used_s < idle_s:
                self._idle_used_s = idle_s
            unused_s = self.idle_s - self._idle_used_s
            if answer_s <= unused_s:
                self._idle_used_s += answer_s
            else:
                self._idle_used_s = self.idle_s
                free_s += answer_s - unused_s
        self.free_s = free_s


def _free_s(process: _Process) -> float:
    """Returns the time at which a process becomes free, s."""
    return process.free_s


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
    each request that reaches the engine. interval: the engine checks for requests at every n-th decode
    iteration. num_iterations: returns the number of iterations that it has committed.
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

        Must be called before the commit of the step if the engine plans ahead, else after it. If the engine
        does not check for requests then, they stay pending.
        """
        num_iterations = self._num_iterations() + (step.num_iterations if self.plans_ahead else 0)
        if not step.plan.chunks and num_iterations % self._interval:
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
        """Enters one pending request, possibly ahead of others."""
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
        """Returns the iterations of a step, at least num_iterations, after which the engine checks."""
        if step.plan.chunks:
            return num_iterations
        return num_iterations + -(self._num_iterations() + num_iterations) % self._interval
