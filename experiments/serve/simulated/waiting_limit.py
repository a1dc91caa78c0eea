"""A limit on the requests that wait in a replica; further ones are refused, with status 503."""

from __future__ import annotations

from experiments.serve.simulated.fleet import SimulatedFleet
from sim.cluster.gateway import GatewayAttachment, RequestAttempt
from sim.engine.replica import Replica


class WaitingLimit(GatewayAttachment):
    """Lets the router choose only replicas with fewer than max_waiting waiting requests.

    Waiting are those in the queue of the engine, and those on their way to it. A request that finds no such
    replica is refused.
    """

    def __init__(self, fleet: SimulatedFleet, max_waiting: int) -> None:
        self._gateway = fleet.simulation.gateway
        self._max_waiting = max_waiting
        self._reason = f"the queue is full (max_waiting={max_waiting})"
        self._gateway.attach(self)

    def candidates(self, attempt: RequestAttempt, serving: list[Replica], now: float) -> list[Replica] | None:
        free = [replica for replica in serving if self._has_room(replica)]
        if not free:
            self._gateway.fail(attempt, self._reason)
            return None
        return serving if len(free) == len(serving) else free  # the list of all has its counts as arrays

    def _has_room(self, replica: Replica) -> bool:
        num_waiting = replica.core.num_waiting
        return num_waiting < self._max_waiting and (
            num_waiting + len(replica.intake.entries()) < self._max_waiting
        )
