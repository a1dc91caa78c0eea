"""One replica of a simulated fleet as a back end of its own, so that a router of clients sees single engines.

A request of such a back end is pinned: the gateway of the simulation lets its router choose from this replica
only. Admission policies see it as they see every request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from experiments.serve.backend import Backend, BackendLayer, Delta, Generation, ServedModel
from experiments.serve.errors import ApiError
from experiments.serve.http.kv_transfer import PARAM
from experiments.serve.simulated.fleet import SimulatedFleet
from sim.cluster.fleet import State
from sim.cluster.gateway import GatewayAttachment, RequestAttempt
from sim.engine.replica import Replica

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
