"""Simulated time: a SimPy environment with events at absolute times, in phases within one instant."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from typing import Final

from simpy import Environment

from sim.engine.interrupt import Interrupt


class Phase(IntEnum):
    """The order of what happens at one instant; within a phase, replicas go by index.

    Iterations end, then the KV that they have computed is replicated, then requests arrive or are given up,
    then replicas crash, come and go, then those that are there plan. So a request that arrives at the very
    end of an iteration is seen by the plan made there, whether the replica had leapt to that boundary or
    stepped to it. What engines that plan ahead see one plan late comes after that plan.
    """

    commit = 0
    replicate_kv = 500_000
    arrive = 1_000_000
    control = 1_500_000
    plan = 2_000_000
    late = 3_000_000


ARRIVE: Final = int(Phase.arrive)
"""A constant, as a member of an enum takes 50 ns to read through its class in Python 3.11."""


class Clock(Environment):
    """SimPy's environment plus `at`. An event is a number, that of its place in the order of their making.

    SimPy schedules by delay, and now + (t - now) may miss t by a bit. Leaping must reach the very same
    times as stepping, so `at` puts the absolute time into SimPy's queue (its private names are used here
    and nowhere else). All events are made by `at`, so they and `run_some` need nothing of what SimPy does for
    events that may fail, are waited for by several, or belong to processes. An event cannot be taken back:
    the callback compares its number with that of the event that counts.
    """

    now = 0.0
    """Simulated time; an attribute, as nothing is read more often."""

    def at(self, time_s: float, priority: int, callback: Callable[[int], None]) -> int:
        """Call `callback` with the event's number, which is returned, at time_s >= now.

        Smaller priorities go first, then those set earlier.
        """
        event = next(self._eid)
        heappush(self._queue, (time_s, priority, event, callback))  # type: ignore[misc]
        return event

    def is_quiet(self) -> bool:
        """Whether nothing else is to happen at this instant."""
        return not self._queue or self._queue[0][0] > self.now

    is_stopped = False

    def stop(self) -> None:
        """Let `run_some` process no more events."""
        self.is_stopped = True

    def run_some(self, max_events: int, until_s: float, interrupt: Interrupt) -> bool:
        """Process up to max_events events that are due by until_s; False if it stops earlier."""
        queue = self._queue
        for _ in range(max_events):
            if not queue or queue[0][0] > until_s or interrupt.noted or self.is_stopped:
                return False
            self.now, _, event, callback = heappop(queue)
            callback(event)  # type: ignore[operator]
        return True
