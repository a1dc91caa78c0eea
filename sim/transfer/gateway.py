"""The interface of the gateway for KV transfers; `sim.cluster.transfer_gateway` implements it."""

from __future__ import annotations

from typing import Protocol

from policies.core.limits import StopAfter
from policies.core.request import Request
from policies.routing import Routing
from sim.engine.replica import Replica


class Replicas(Protocol):
    """The replicas of a run."""

    @property
    def decoding_all(self) -> list[Replica]:
        """Replicas of decode and mixed pools, which may continue requests of prefill replicas."""
        ...

    def for_decode(self, request: Request) -> list[Replica]:
        """Returns the candidates of the decode router for a request that has completed its prefill."""
        ...

    def next_serving(self, replica: Replica) -> Replica | None:
        """Returns the next replica by index that serves and is reached; None: there is no other."""
        ...

    def is_reached(self, replica: Replica) -> bool:
        """Returns whether the link to a replica is up."""
        ...


class GatewayForTransfers(Protocol):
    """Keeps track of the replica of each request during KV transfers."""

    @property
    def fleet(self) -> Replicas:
        """All replicas of the run."""
        ...

    def stop_after(self, request_id: int) -> StopAfter:
        """Returns the number of output tokens after which a request ends."""
        ...

    def num_sends(self, request_id: int) -> int:
        """Returns how often the router has chosen a replica for a request."""
        ...

    def predict_for(self, routing: Routing, request: Request) -> None:
        """Passes the predicted output length of a request to a routing policy."""
        ...

    def first_token(self, request_id: int) -> None:
        """Notifies the policies of the first token of a request."""
        ...

    def moved(self, request: Request, replica: Replica) -> None:
        """Marks a request as continued in another replica."""
        ...

    def returned(self, request_id: int, replica: Replica) -> None:
        """Marks a request as back in its prefill replica, as no other replica has it."""
        ...

    def released(self, replica: Replica, request: Request, num_sends: int) -> None:
        """Notifies the router that a replica has freed the slot and blocks of a transferred request.

        num_sends: its value when the KV transfer began.
        """
        ...

    def refuse(self, request: Request, reason: str) -> None:
        """Fails an attempt that the decode replica can never continue."""
        ...

    def restart(self, request_id: int, *, is_resend: bool = True) -> None:
        """Restarts a request that no replica has any more, after its streamed tokens or from scratch.

        is_resend: whether the cause is a crash of its replica, not of the replica with a copy of its KV.
        """
        ...
