"""One replica of a simulated fleet as a back end with a port, so that a router sees single engines.

Its port is that of the fleet + 1 + its index. A request of such a back end is pinned: the gateway of the
simulation lets its router choose from this replica only. Admission policies see it as they see every request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from aiohttp import web

from experiments.serve.backend import Backend, BackendLayer, Delta, Generation, ServedModel
from experiments.serve.errors import ApiError
from experiments.serve.http.kv_transfer import PARAM
from experiments.serve.server import Listener, listen
from experiments.serve.settings import Address
from experiments.serve.simulated.fleet import SimulatedFleet
from sim.cluster.fleet import State
from sim.cluster.gateway import GatewayAttachment, RequestAttempt
from sim.engine.replica import Replica

_LOG = logging.getLogger("windtunnel.serve")
NOT_TAKEN = "this replica takes no requests"


class PinnedRequests(GatewayAttachment):
    """Restricts the choice of the router to the replica that a request has to be served by, if any."""

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._gateway = fleet.simulation.gateway
        self._traffic = fleet.simulation.traffic
        self._replica_of: dict[int, int] = {}  # by request id
        fleet.on_begin.append(self._begun)
        fleet.on_close.append(self._closed)
        self._gateway.attach(self)

    def candidates(self, attempt: RequestAttempt, serving: list[Replica], now: float) -> list[Replica] | None:
        index = self._replica_of.get(attempt.arrival.request.request_id)
        if index is None:
            return serving
        found = [replica for replica in serving if replica.index == index]
        if not found:
            self._gateway.fail(attempt, NOT_TAKEN)
            return None
        return found

    def _begun(self, request_id: int, generation: Generation) -> None:
        if generation.replica is not None:
            self._replica_of[request_id] = generation.replica
            self._traffic.remark("requests sent to the port of a replica")

    def _closed(self, request_id: int, generation: Generation) -> None:
        self._replica_of.pop(request_id, None)


class SingleReplica(BackendLayer):
    """The back end of one replica. backend: that of the fleet, which has `PinnedRequests`."""

    def __init__(self, backend: Backend, fleet: SimulatedFleet, index: int) -> None:
        super().__init__(backend)
        self._index = index
        self._member = fleet.simulation.fleet.members[index]

    def models(self) -> Sequence[ServedModel]:
        """Returns the model of the replica, and its adapters."""
        name = self._member.replica.pool.serves
        return [model for model in super().models() if name in (model.name, model.base)]

    @property
    def num_in_progress(self) -> int:
        return self._member.replica.num_outstanding

    def unhealthy_because(self) -> str | None:
        state = self._member.state
        return None if state is State.serving else f"the replica is {state.name}"

    def generate(self, generation: Generation) -> AsyncGenerator[Delta, None]:
        if self._member.replica.pool.role == "decode" and generation.remote_kv is None:
            raise ApiError(
                f"{PARAM}: must be given, as this replica only decodes; send the request to a prefill "
                f"replica with {PARAM}={{do_remote_decode: true}} and max_tokens=1 first, and then here with "
                "those of its answer, or send it to the port of the fleet",
                param=PARAM,
            )
        return super().generate(replace(generation, replica=self._index))


@asynccontextmanager
async def replica_ports(
    fleet: SimulatedFleet,
    make_app: Callable[[int], web.Application],
    address: Address,
    on_ready: Callable[[int, str], None],
) -> AsyncIterator[None]:
    """Gives all replicas of a fleet ports meanwhile, also those that start later.

    A replica keeps its port until the end; it is unhealthy if it is down or gone. make_app(index): the
    application of a replica. address: of the fleet; with port=0 each replica has any free port.
    on_ready(index, url): called when a port is open. Raises ConfigError if the port of a replica that is
    there from the start cannot be used.
    """
    listeners: list[Listener] = []
    tasks: list[asyncio.Task[None]] = []

    async def open_port(index: int) -> None:
        port = address.port and address.port + 1 + index
        listener, url = await listen(make_app(index), address.host, port, f"port of replica {index}")
        listeners.append(listener)
        on_ready(index, url)

    def added(replica: Replica) -> None:
        task = asyncio.get_running_loop().create_task(open_port(replica.index))
        task.add_done_callback(_log_error)
        tasks.append(task)

    fleet.attach(added)
    try:
        await asyncio.gather(*tasks)
        yield
    finally:
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(listener.cleanup() for listener in listeners))


def _log_error(task: asyncio.Task[None]) -> None:
    error = None if task.cancelled() else task.exception()
    if error is not None:
        _LOG.warning("A replica has no port of its own: %s", error)
