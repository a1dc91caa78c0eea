"""Keeps a live simulation at the wall clock: simulated seconds are wall seconds times `time_scale`.

The event loop wakes the driver for the next event of the simulation. An event is processed up to half a
millisecond early, because timers of an event loop are up to one millisecond late: on average, tokens then
leave at their simulated times.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from math import inf

from policies.user_code import note_time
from sim.cluster.live import LiveSimulation

AHEAD_S = 0.0005
MAX_EVENTS = 256
"""Events after which connections are served again, when many are due."""
LATE_S = 0.1
"""Lateness, in wall seconds, from which on a line is logged, at most every WARN_EVERY_S seconds."""
WARN_EVERY_S = 10.0

_LOG = logging.getLogger("windtunnel.serve")


class Driver:
    """Advances a simulation in the running event loop."""

    def __init__(self, simulation: LiveSimulation, time_scale: float) -> None:
        self._simulation = simulation
        self.time_scale = time_scale
        self._began_s = 0.0
        self._timer: asyncio.Handle | None = None
        self._timer_s = inf  # simulated time for which the timer is set
        self._warned_s = -inf
        self.failure: Exception | None = None
        """The error that has ended the simulation, such as one of a policy; its clock stands still."""
        self.on_failure: list[Callable[[], None]] = []
        self.on_advanced: list[Callable[[], None]] = []
        """Called after each group of events."""
        self.began_work_s = 0.0
        """CPU seconds of the thread when it began to process the present events."""
        self.late_s = 0.0
        """Wall seconds by which the last processed event was late."""
        self.max_late_s = 0.0
        """Wall seconds by which the latest event since the start was late."""

    def start(self) -> None:
        """Starts the clock; simulated time begins at 0."""
        self._loop = asyncio.get_running_loop()
        self._began_s = time.monotonic()
        self._arm()

    def stop(self) -> None:
        """Stops the clock."""
        if self._timer is not None:
            self._timer.cancel()

    def now(self) -> float:
        """Returns the present as simulated time, s."""
        return self.at(time.monotonic())

    def at(self, monotonic_s: float) -> float:
        """Returns a value of time.monotonic() as simulated time, s."""
        return (monotonic_s - self._began_s) * self.time_scale

    def wake(self) -> None:
        """Takes notice of an event that has been added to the simulation."""
        if self.failure is None and self._simulation.next_event_s < self._timer_s:
            self._arm()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._timer_s = next_s = self._simulation.next_event_s
        if next_s < inf:
            wait_s = (next_s - self.now()) / self.time_scale - AHEAD_S
            self._timer = (
                self._loop.call_soon(self._tick) if wait_s <= 0 else self._loop.call_later(wait_s, self._tick)
            )

    def _tick(self) -> None:
        simulation, now = self._simulation, self.now()
        self.began_work_s = time.thread_time()
        self.late_s = max(0.0, now - simulation.next_event_s) / self.time_scale
        self.max_late_s = max(self.max_late_s, self.late_s)
        if self.late_s > LATE_S:
            self._warn()
        self._timer = None
        try:
            simulation.advance(now + AHEAD_S * self.time_scale, MAX_EVENTS)
        except Exception as error:
            self._fail(error)
        else:
            for notify in self.on_advanced:
                notify()
            self._arm()

    def _fail(self, error: Exception) -> None:
        _LOG.error("The simulation has failed, and the server serves no more requests.", exc_info=error)
        note_time(error, self._simulation.now)
        self.failure = error
        for notify in self.on_failure:
            notify()

    def _warn(self) -> None:
        if time.monotonic() - self._warned_s > WARN_EVERY_S:
            self._warned_s = time.monotonic()
            _LOG.warning(
                "The server is %.2f s behind the clock, so latencies that clients see are too long; lower "
                "time_scale or the load.",
                self.late_s,
            )
