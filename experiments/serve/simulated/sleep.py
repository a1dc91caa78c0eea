"""The sleep mode of a simulated fleet, as in vLLM: the KV is dropped, and to wake takes the time of a load.

    level 1  the weights are in host memory, and come back over PCIe
    level 2  the weights are dropped, and come back from the storage of the scenario's cold start

A sleeping server refuses requests with 503; it is healthy all the same, as its process is.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection
from http import HTTPStatus

from experiments.serve.backend import BackendLayer, Delta, Generation
from experiments.serve.errors import ApiError
from experiments.serve.http.control import Mode, Part, SleepMode
from experiments.serve.simulated.fleet import SimulatedFleet

POLL_S = 0.002


class SleepyFleet(BackendLayer):
    """A simulated fleet that can sleep: a `Sleeper`, and what it does with requests meanwhile."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        super().__init__(fleet)
        self.mode = SleepMode(self)
        self._fleet = fleet
        self._load_s = 0.0  # simulated seconds that the weights take to come back

    def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        if self.mode.is_sleeping:
            raise ApiError("the server is asleep; POST /wake_up wakes it", HTTPStatus.SERVICE_UNAVAILABLE)
        return self._fleet.generate(generation)

    async def fall_asleep(self, level: int, mode: Mode) -> None:
        simulation = self._fleet.simulation
        if mode == "abort":
            self._fleet.abort_all()
        while simulation.num_in_progress:
            await asyncio.sleep(POLL_S)
        simulation.empty_engines()
        pools = self._fleet.scenario.pools_by_name.values()
        self._load_s = max(pool.load_from_host_s if level == 1 else pool.load_s for pool in pools)

    async def load(self, parts: Collection[Part], *, is_last: bool) -> None:
        """Waits for the weights, which take their time."""
        if "weights" in parts:
            await asyncio.sleep(self._load_s / self._fleet.driver.time_scale)
