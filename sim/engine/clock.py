"""Simulated time: a SimPy environment with events at absolute times, ordered by phase at equal times."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from heapq import heappop, heappush
from typing import Any, Final

from simpy import Environment

from sim.engine.interrupt import Interrupt


class Phase(IntEnum):
    """The order of events at the same time; within a phase, events of replicas are ordered by their index.

    Iterations end, then the KV that they have computed is replicated, then pending requests end that were
    aborted and reach an engine between two steps, then requests arrive or are aborted, then replicas crash,
    start and stop, then the running replicas plan. So a request that arrives exactly at the end of an
    iteration is in the plan that is made there, whether the replica had leapt to that boundary or stepped to
    it; and the router that sends it counts no request that ends at that time.
    """

    commit = 0
    replicate_kv = 500_000
    abort = 900_000
    arrive = 1_000_000
    control = 1_500_000
    plan = 2_000_000


ARRIVE: Final = int(Phase.arrive)
"""A constant, as reading a member of an enum through its class takes 50 ns in Python 3.11."""


class Clock(Environment):
    """SimPy's environment plus `at`. An event is a number that counts up in the order of creation.

    SimPy schedules by delay, and now + (t - now) may differ from t in the last bit. Leaping must reach the
    same times as stepping to the last bit, so `at` puts the absolute time into SimPy's queue (SimPy's private
    names are used in this class only). All events are created by `at`, so `run_some` leaves out what SimPy
    does for events that may fail, have several waiters, or belong to processes. An event cannot be cancelled:
    the callback compares its number with that of the event that is still valid.
    """

    now = 0.0
    """Simulated time, s; an attribute in place of SimPy's property, as nothing is read more often."""

    def at(self, time_s: float, priority: int, callback: Callable[[int], None]) -> int:
        """Schedules callback(event) at time_s >= now; returns the number of the event.

        Events at the same time are processed by priority, smallest first, then in the order of creation.
        """
        event = next(self._eid)
        heappush(self._queue, (time_s, priority, event, callback))  # type: ignore[misc]
        return event

    def is_quiet(self) -> bool:
        """Returns whether no other event is due at the current time."""
        return not self._queue or self._queue[0][0] > self.now

    @property
    def queue(self) -> list[tuple[float, int, int, Any]]:
        """Scheduled events, a heap of (time, priority, number, callback): one list for the whole run."""
        return self._queue  # type: ignore[return-value]

    is_stopped = False

    def stop(self) -> None:
        """Makes `run_some` return before the next event."""
        self.is_stopped = True

    def run_some(self, max_events: int, until_s: float, interrupt: Interrupt) -> bool:
        """Processes up to max_events events that are due by until_s; returns false if it stops earlier."""
        queue = self._queue
        for _ in range(max_events):
            if not queue or queue[0][0] > until_s or interrupt.noted or self.is_stopped:
                return False
            self.now, _, event, callback = heappop(queue)
            callback(event)  # type: ignore[operator]
        return True
