"""The load: requests sent at their times, whatever the server does, and what follows from the ended ones.

Open loop: a request leaves at its arrival time, also if all others are still being answered. How late it
left, and how long this process was busy with other things, is recorded: a slow client looks like a slow
server.
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
from sim.engine.interrupt import Interrupt
from sim.records.requests import Status
from sim.workload.base import Arrival, Source

AHEAD_BYTES = 64 << 20
"""Of bodies written before they are needed: long prompts take milliseconds, in which nothing is received."""
MAX_HOLD_S = 0.002
"""How long overdue requests, whose bodies may have to be written, keep this process to themselves."""
BEAT_S = 0.02
LEAD_S = 0.1
GRACE_S = 1.0
"""After giving up: a dead server's connections end at once, but not all are seen in one round."""

Send = Callable[[bytes, Reply, Callable[[], float]], Awaitable[None]]


class Question(NamedTuple):
    """A request, ready to be sent."""

    request: Request
    num_tokens: int | None  # asked for; None: as many as the server likes
    body: bytes


class Load:
    """One run. write: arrival -> what is sent; answered: called with each reply that ended well.

    until_s ends the run at that time; give_up_after: connections lost in a row that end it, and what is
    being answered then has failed.
    """

    def __init__(
        self,
        source: Source,
        *,
        write: Callable[[Arrival], Question],
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
        self._num_lost = 0  # in a row
        self.replies: list[Reply] = []
        self.num_ended = 0
        self.stopped = ""  # why, if before the traffic's end
        self.stalls_s = array("d")  # how much longer than asked each nap of the heartbeat was
        self.end_s = 0.0

    async def run(self, report: Callable[[float, int, int], None] | None = None) -> None:
        """Send everything and wait for the answers; report(seconds, sent, ended) is called now and then."""
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
        """Seconds since the run began."""
        return time.perf_counter() - self._zero_s

    def stop(self, why: str) -> None:
        """Send nothing more and leave what is being answered, unfinished."""
        if not self.stopped:
            self.stopped = why
            for task in self._tasks:
                task.cancel()

    async def _give_up(self) -> None:
        """See out the answers under way for a moment, then leave them as failed; nothing more is sent."""
        until_s = self.now() + GRACE_S
        while self.num_ended < len(self.replies) and self.now() < until_s:
            await asyncio.sleep(BEAT_S)
        for reply in self.replies:
            if reply.status is Status.unfinished:
                reply.fail("no end of the answer when the run was given up", self.now())
        for task in self._tasks:
            task.cancel()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _feed(self, first: Question | None, more: Iterator[Question]) -> None:
        question, yielded_s = first, self.now()
        while question is not None and not self.stopped:
            wait_s = question.request.arrival_s - self.now()
            # All that is due leaves together: to let the others run after each would send one a round, and
            # rounds are long when there is much to receive.
            if wait_s > 0 or self.now() - yielded_s > MAX_HOLD_S:
                await asyncio.sleep(max(wait_s, 0.0))
                yielded_s = self.now()
                if self.stopped:
                    return
            self._begin(self._one(question))
            question = next(more, None)

    def _prepared(self) -> Iterator[Question]:
        """The open loop's questions, some of them written ahead.

        Of traffic that depends on the answers one only is taken ahead, as in the simulation.
        """
        ahead: deque[Question] = deque()
        num_bytes, limit = 0, AHEAD_BYTES if self._source.last_arrival_s is not None else 0
        for arrival in self._source.arrivals():
            ahead.append(self._write(arrival))
            num_bytes += len(ahead[-1].body)
            while num_bytes > limit:
                num_bytes -= len(ahead[0].body)
                yield ahead.popleft()
        yield from ahead

    async def _one(self, question: Question) -> None:
        """Send one request, see it through, and begin what follows from its end."""
        request = question.request
        reply = Reply(request=request, num_asked=question.num_tokens, due_s=request.arrival_s)
        self.replies.append(reply)
        try:
            async with asyncio.timeout(self._source.patience_s):
                await self._send(question.body, reply, self.now)
        except TimeoutError:
            reply.status, reply.finish_reason, reply.ended_s = Status.aborted, "patience", self.now()
        self.num_ended += 1
        if reply.status is Status.finished:
            self._answered(reply)
        self._num_lost = self._num_lost + 1 if reply.lost else 0
        if self._num_lost >= self._give_up_after and not self.stopped:
            self.stopped = f"{self._num_lost} connections in a row were lost ({reply.error})"
            self._begin(self._give_up())
        arrival = self._source.follow_up(request, self.now(), reply.num_tokens)
        if arrival is not None and not self.stopped:
            self._begin(self._later(arrival))

    async def _later(self, arrival: Arrival) -> None:
        question = self._write(arrival)
        await asyncio.sleep(max(0.0, question.request.arrival_s - self.now()))
        if not self.stopped:
            await self._one(question)

    async def _beat(self, report: Callable[[float, int, int], None] | None) -> None:
        """Nap, and note by how much each nap was too long: so long did received bytes wait for their time."""
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
