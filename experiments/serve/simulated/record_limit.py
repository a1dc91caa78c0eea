"""Limits the memory of the records of a live simulation, which would grow for as long as it serves.

Once they are full, the records end. From then on, a new request gets the id, and with it the row in the log,
of one that has ended, and what is logged of iterations is dropped from time to time.
"""

from __future__ import annotations

import logging
from collections import deque

from sim.cluster.live import LiveSimulation

CHECKED_EVERY = 64
"""Requests between two checks of the memory."""
MAX_DISCARDED_BYTES = 2 << 20
"""Memory of logs that are not recorded, from which on they are dropped."""
MIN_SPARE = 1024
"""Ids that are not used again at once, as random draws depend on the id of a request."""

_LOG = logging.getLogger("windtunnel.serve")


class RecordLimit:
    """Gives request ids, and ends the records of a simulation when they fill max_bytes."""

    def __init__(self, simulation: LiveSimulation, max_bytes: float) -> None:
        self._simulation = simulation
        self._max_bytes = max_bytes
        self._num_taken = 0
        self._next_id = 0
        self._spare: deque[int] = deque()  # ids of requests that have ended since
        self._kept_bytes = 0
        self.full_s: float | None = None
        """Simulated time at which the memory was full; None: everything is recorded."""

    def take(self) -> int:
        """Returns the id of a new request."""
        if self._num_taken % CHECKED_EVERY == 0:
            self._check()
        self._num_taken += 1
        if len(self._spare) > MIN_SPARE:
            request_id = self._spare.popleft()
            self._simulation.requests.clear(request_id)
            return request_id
        self._next_id += 1
        return self._next_id - 1

    def give_back(self, request_id: int) -> None:
        """Takes back the id of a request that has ended, and of which nothing will be read any more."""
        if self.full_s is not None:
            self._spare.append(request_id)

    def _check(self) -> None:
        simulation = self._simulation
        if self.full_s is not None:
            if simulation.num_record_bytes > self._kept_bytes + MAX_DISCARDED_BYTES:
                simulation.discard_records()
                self._kept_bytes = simulation.num_record_bytes
        elif simulation.num_record_bytes >= self._max_bytes:
            self.full_s = simulation.now
            simulation.end_records()
            self._kept_bytes = simulation.num_record_bytes
            _LOG.warning("The memory for records is full; the run folder will end here.")
