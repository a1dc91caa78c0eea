"""Functions of the gateway that KV transfers between replicas call: see `sim.transfer.gateway`."""

from __future__ import annotations

from math import inf

from policies.core.limits import StopAfter
from policies.core.request import Request
from policies.routing import Routing
from sim.cluster.first_tokens import FirstTokens
from sim.cluster.fleet import Fleet
from sim.cluster.gateway import Gateway
from sim.cluster.gateway_attachment import GatewayAttachment
from sim.cluster.length_predictions import LengthPredictions
from sim.cluster.pool_counts import PoolCounts
from sim.cluster.request_attempt import RequestAttempt
from sim.cluster.resends import Resends
from sim.engine.replica import Replica
from sim.records.requests import RequestLog
from sim.transfer.kv_transfers import KvTransfers


class TransferGateway:
    """Keeps track of the replica of each request during KV transfers."""

    def __init__(
        self,
        gateway: Gateway,
        resends: Resends,
        *,
        first_tokens: FirstTokens,
        length_predictions: LengthPredictions | None,
        requests: RequestLog,
    ) -> None:
        self.pool_counts: PoolCounts  # set by `GatewayAssembly.connect`
        self.restart = resends.restart
        self.first_token = first_tokens.notify
        self._gateway = gateway
        self._length_predictions = length_predictions
        self._requests = requests

    @property
    def fleet(self) -> Fleet:
        """All replicas of the run."""
        return self._gateway.fleet

    def stop_after(self, request_id: int) -> StopAfter:
        """Returns the number of output tokens after which a request ends."""
        return self._gateway.attempts[request_id].stop_after

    def num_sends(self, request_id: int) -> int:
        """Returns how often the router has chosen a replica for a request."""
        return self._requests.attempts[request_id]

    def predict_for(self, routing: Routing, request: Request) -> None:
        """Passes the predicted output length of a request to a routing policy."""
        assert self._length_predictions is not None
        self._length_predictions.predict_for(routing, request)

    def moved(self, request: Request, replica: Replica) -> None:
        """Marks a request as continued in another replica."""
        self._gateway.attempts[request.request_id].replica = replica
        self.pool_counts.sent(replica, request)

    def returned(self, request_id: int, replica: Replica) -> None:
        """Marks a request as back in its prefill replica, as no other replica has it."""
        self._gateway.attempts[request_id].replica = replica

    def released(self, replica: Replica, request: Request, num_sends: int) -> None:
        """Notifies the router that a replica has freed the slot and blocks of a transferred request.

        num_sends: its value when the KV transfer began.
        """
        attempt = self._gateway.attempts.get(request.request_id)
        if attempt is not None and self.num_sends(request.request_id) == num_sends:
            self._gateway.notify_router(attempt)  # else it was notified when that attempt ended
        self.pool_counts.released(replica)

    def refuse(self, request: Request, reason: str) -> None:
        """Fails an attempt that the decode replica can never continue."""
        attempt = self._gateway.attempts[request.request_id]
        self._gateway.release(attempt)
        self._gateway.fail(attempt, reason, inf)


class PrefillPools(GatewayAttachment):
    """Sends prompts to prefill pools, and also to mixed replicas once these have enough tokens queued."""

    def __init__(self, kv_transfers: KvTransfers, gateway: Gateway) -> None:
        self._kv_transfers = kv_transfers
        self._gateway = gateway

    def candidates(self, attempt: RequestAttempt, serving: list[Replica], now: float) -> list[Replica]:
        return self._gateway.fleet.for_prompt(self._kv_transfers.overflow_tokens)

    def sends(self, attempt: RequestAttempt, replica: Replica, request: Request) -> bool:
        self._kv_transfers.check(replica, request, request.prompt.num_tokens)
        return False

    def aborts(self, request_id: int) -> None:
        self._kv_transfers.withdraw(request_id)

    def left(self, attempt: RequestAttempt, now: float) -> None:
        self._kv_transfers.ended(attempt.arrival.request, now)

    def fleet_changed(self) -> None:
        self._kv_transfers.ready()
