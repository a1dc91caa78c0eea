"""Sends requests at their times, whatever the server does, and the requests that depend on their outputs.

Open loop: a request is sent at its arrival time, even if all earlier ones are still running. The lateness of
each request and the stalls of this process are recorded, because a slow client looks like a slow server.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import Any, NamedTuple

from experiments.observe.reply import Reply
from policies.core.request import Request
from sim.engine.clock import Interrupt
from sim.records.requests import Status
from sim.workload.base import Arrival, Source

AHEAD_BYTES = 64 << 20
"""Bytes of bodies encoded ahead: encoding a long prompt takes milliseconds, in which no data is received."""
MAX_HOLD_S = 0.002
"""Longest time in seconds for which sending overdue requests keeps this process from receiving data."""
BEAT_S = 0.02
LEAD_S = 0.1
GRACE_S = 1.0
"""Seconds that running requests may still take after giving up, so that all lost connections are noticed."""

Send = Callable[[bytes, Reply, Callable[[], float]], Awaitable[None]]


class PreparedRequest(NamedTuple):
    """A request and its encoded body."""

    request: Request
    num_tokens: int | None  # output tokens to request; None: the server's choice
    body: bytes


class Load:
    """One run of a load.

    write: encodes an arrival. answered: called with each finished reply. until_s: the run ends at this time.
    give_up_after: number of lost connections in a row that ends the run; requests running then count as
    failed.
    """

    def __init__(
        self,
        source: Source,
        *,
        write: Callable[[Arrival], PreparedRequest],
        send: Send,
        answered: Callable[[Reply], None] = lambda reply: None,
        until_s: float | None = None,
        give_up_after: int = 20,
        interrupt: Interrupt | None = None,
    ) -> None:
        self._source = source
        self._write = write
        self._send = send
        self._answered = answered
        self._until_s = float("inf") if until_s is None else until_s
        self._give_up_after = give_up_after
        self._interrupt = interrupt or Interrupt()
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._zero_s = 0.0
        self._num_lost = 0  # connections lost in a row
        self.replies: list[Reply] = []
        self.num_ended = 0
        self.stopped = ""  # the reason, if the run ended before the end of the workload
        self.stalls_s = array("d")  # seconds by which each sleep of the heartbeat was too long
        self.end_s = 0.0

    async def run(self, report: Callable[[float, int, int], None] | None = None) -> None:
        """Sends all requests and waits for their ends; calls report(seconds, sent, ended) every 20 ms."""
        prepared = self._prepared()
        first = next(prepared, None)
        self._zero_s = time.perf_counter() + LEAD_S
        beat = asyncio.create_task(self._beat(report))
        try:
            async with self._group:
                self._begin(self._feed(first, prepared))
        finally:
            beat.cancel()
        ended_s = max((reply.ended_s for reply in self.replies), default=0.0)
        self.end_s = self.now() if self.stopped else ended_s

    def now(self) -> float:
        """Returns the seconds since the run began."""
        return time.perf_counter() - self._zero_s

    def stop(self, why: str) -> None:
        """Stops sending; running requests stay unfinished."""
        if not self.stopped:
            self.stopped = why
            for task in self._tasks:
                task.cancel()

    async def _give_up(self) -> None:
        """Waits briefly for running requests, then marks the rest as failed and stops sending."""
        until_s = self.now() + GRACE_S
        while self.num_ended < len(self.replies) and self.now() < until_s:
            await asyncio.sleep(BEAT_S)
        for reply in self.replies:
            if reply.status is Status.unfinished:
                reply.fail("still running when the run gave up", self.now())
        for task in self._tasks:
            task.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _feed(self, first: PreparedRequest | None, more: Iterator[PreparedRequest]) -> None:
        prepared_request, yielded_s = first, self.now()
        while prepared_request is not None and not self.stopped:
            wait_s = prepared_request.request.arrival_s - self.now()
            # All due requests are sent together: yielding after each would send one per event loop round, and
            # rounds are long when much data is received.
            if wait_s > 0 or self.now() - yielded_s > MAX_HOLD_S:
                await asyncio.sleep(max(wait_s, 0.0))
                yielded_s = self.now()
                if self.stopped:
                    return
            self._begin(self._one(prepared_request))
            prepared_request = next(more, None)

    def _prepared(self) -> Iterator[PreparedRequest]:
        """Yields the open loop's requests in order, encoded up to AHEAD_BYTES ahead.

        If arrivals depend on outputs, only one is taken ahead, as in the simulation.
        """
        ahead: deque[PreparedRequest] = deque()
        num_bytes, limit = 0, AHEAD_BYTES if self._source.last_arrival_s is not None else 0
        for arrival in self._source.arrivals():
            ahead.append(self._write(arrival))
            num_bytes += len(ahead[-1].body)
            while num_bytes > limit:
                num_bytes -= len(ahead[0].body)
                yield ahead.popleft()
        yield from ahead

    async def _one(self, prepared_request: PreparedRequest) -> None:
        """Sends one request, waits for its end, and schedules the request that follows from it."""
        request = prepared_request.request
        reply = Reply(request=request, num_asked=prepared_request.num_tokens, due_s=request.arrival_s)
        self.replies.append(reply)
        try:
            async with asyncio.timeout(self._source.patience_s):
                await self._send(prepared_request.body, reply, self.now)
        except TimeoutError:
            reply.status, reply.finish_reason, reply.ended_s = Status.aborted, "patience", self.now()
        self.num_ended += 1
        if reply.status is Status.finished:
            self._answered(reply)
        self._num_lost = self._num_lost + 1 if reply.lost else 0
        if self._num_lost >= self._give_up_after and not self.stopped:
            self.stopped = f"{self._num_lost} connections in a row were lost ({reply.error})"
            self._begin(self._give_up())
        for arrival in self._source.follow_ups(request, self.now(), reply.num_tokens):
            if not self.stopped:
                self._begin(self._later(arrival))

    async def _later(self, arrival: Arrival) -> None:
        prepared_request = self._write(arrival)
        await asyncio.sleep(max(0.0, prepared_request.request.arrival_s - self.now()))
        if not self.stopped:
            await self._one(prepared_request)

    async def _beat(self, report: Callable[[float, int, int], None] | None) -> None:
        """Sleeps in short intervals and records the excess of each: received bytes waited as long."""
        while not self.stopped:
            before = time.perf_counter()
            await asyncio.sleep(BEAT_S)
            self.stalls_s.append(max(time.perf_counter() - before - BEAT_S, 0.0))
            if report:
                report(self.now(), len(self.replies), self.num_ended)
            if self._interrupt.noted:
                self.stop("interrupted")
            elif self.now() >= self._until_s:
                self.stop("until_s")
