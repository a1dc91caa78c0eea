"""The front end of an engine: the API server's processes, which parse, tokenise, detokenise and stream.

A request that reaches a replica waits for one of `servers` processes, in the order of arrival, is worked on,
and goes on to the scheduler, `frontend_s` seconds later (hand-over between processes, no work). The process
that took a request also detokenises and streams its answer:

    arrival | wait | request_s + prompt tokens x prompt_token_s | frontend_s | scheduler ... tokens
                                                                  output tokens x output_token_s

Departures are computed at arrival, without events (Lindley's recursion for each process). The work of an
answer arises evenly while it is generated, about `token_gap_s` a token. What the process can do of it in
time that would be idle delays no request; the rest is put into its queue when the answer ends. So no work is
lost: with one process the rate is at most 1 / (request_s + p prompt_token_s + a output_token_s) requests/s.

Tokens are recorded when the engine has them: what a busy process adds to the gaps between them is not seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Annotated

from fieldlimits import Checked, Ge, Le, NonNegative, Unit, check
from hwmodels.checks import check_finite
from policies.core.limits import StopAfter
from policies.core.request import Request

MAX_SERVERS = 1_000
"""Most processes of a front end."""

TOKENS = 1_000
"""Prompt tokens for which a front end's idle time is stated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontend(Checked):
    """The work of an engine's API server. The defaults are no work, so that no request waits."""

    servers: Annotated[int | None, Ge(1), Le(MAX_SERVERS)] = None
    """Processes (vLLM's --api-server-count); None: one, with vLLM one for each data-parallel rank."""
    request_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Seconds of work for a request: HTTP, parsing, hand-over."""
    prompt_token_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Seconds of work for a token of the prompt, cached or not: tokenisation."""
    output_token_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Seconds of work for a token of the answer: detokenisation and streaming."""
    range_s: tuple[float, float] | None = None
    """Least and largest idle time of the whole front end that measurements show, s; None: none shows it."""

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

    latency_s: seconds after the work until the scheduler knows a request. token_gap_s: returns the time
    between two tokens of an answer that is alone, s.
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
        """By id of a request that no plan has included: seconds from its arrival to the scheduler."""

    def reset(self) -> None:
        """Replaces its processes by idle ones, after a crash."""
        self._processes = [_Process() for _ in self._processes]
        self.taken_s.clear()

    def known_s(self, now: float, request: Request, stop_after: StopAfter) -> float:
        """Takes a request that arrives now; returns the time at which the scheduler knows it, s.

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
    """Returns the output tokens of a request, and those of its longest branch."""
    if isinstance(stop_after, tuple):
        return sum(stop_after), max(stop_after)
    longest = (request.max_tokens or 0) if stop_after is None else stop_after
    return longest * (1 if request.branching is None else request.branching.width), longest


class _Process:
    """One process: when it is free, how long it was idle, and the work of answers that are under way.

    idle_s: sum of its idle times until free_s. owed: a heap of (end of an answer, its work, idle_s at its
    start), s.
    """

    __slots__ = ("_idle_used_s", "free_s", "idle_s", "owed")

    def __init__(self) -> None:
        self.free_s = self.idle_s = 0.0
        self._idle_used_s = 0.0  # up to this sum of idle times, answers have been worked on
        self.owed: list[tuple[float, float, float]] = []

    def pay(self, now: float) -> None:
        """Does what idle time has not done of the answers that have ended by now, or before it is free."""
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
    """Returns the time at which a process is free, s."""
    return process.free_s
