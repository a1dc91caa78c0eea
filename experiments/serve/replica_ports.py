"""Listens on a port for each replica, in addition to that of the fleet: port + 1 + index of the replica."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from types import TracebackType

from aiohttp import web

from experiments.serve.server import Listener, listen
from experiments.serve.settings import Address
from experiments.serve.simulated.fleet import SimulatedFleet
from sim.engine.replica import Replica
from sim.settings.errors import ConfigError

_LOG = logging.getLogger("windtunnel.serve")


class ReplicaPorts:
    """An async context in which all replicas of a fleet have ports, also those that start later.

    A replica keeps its port until the end; it is unhealthy if it is down or gone. make_app(index): the
    application of a replica. on_ready(index, url): called when its port is open. With port=0 each replica has
    any free port. Raises ConfigError if the port of a replica that is there from the start cannot be used.
    """

    def __init__(
        self,
        fleet: SimulatedFleet,
        make_app: Callable[[int], web.Application],
        address: Address,
        on_ready: Callable[[int, str], None],
    ) -> None:
        self._fleet = fleet
        self._make_app = make_app
        self._address = address
        self._on_ready = on_ready
        self._listeners: list[Listener] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> ReplicaPorts:
        self._fleet.attach(self._added)
        try:
            await asyncio.gather(*self._tasks)
        except ConfigError:
            await self._close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._close()

    async def _close(self) -> None:
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(listener.cleanup() for listener in self._listeners))

    def _added(self, replica: Replica) -> None:
        task = asyncio.get_running_loop().create_task(self._listen(replica.index))
        task.add_done_callback(_log_error)
        self._tasks.append(task)

    async def _listen(self, index: int) -> None:
        port = self._address.port and self._address.port + 1 + index
        listener, url = await listen(
            self._make_app(index), self._address.host, port, f"port of replica {index}"
        )
        self._listeners.append(listener)
        self._on_ready(index, url)


def _log_error(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _LOG.warning("A replica has no port of its own: %s", error)
