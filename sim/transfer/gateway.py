"""The gateway's interface for KV transfers; `sim.cluster.transfer_gateway` implements it."""

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
        """Those that decode for others: of decode pools, and mixed ones."""
        ...

    def for_decode(self, request: Request) -> list[Replica]:
        """Candidates of the decode router for a request whose prompt is computed."""
        ...

    def next_serving(self, replica: Replica) -> Replica | None:
        """The next one by index that serves and can be reached; None: there is no other."""
        ...

    def is_reached(self, replica: Replica) -> bool:
        """Whether the link to a replica is up."""
        ...


class GatewayForTransfers(Protocol):
    """Knows which replica has each request."""

    @property
    def fleet(self) -> Replicas:
        """All replicas."""
        ...

    def stop_after(self, request_id: int) -> StopAfter:
        """Output tokens after which a request ends."""
        ...

    def num_sends(self, request_id: int) -> int:
        """How often the router has chosen a replica for a request."""
        ...

    def predict_for(self, routing: Routing, request: Request) -> None:
        """Tell a router how long an answer is expected to be."""
        ...

    def first_token(self, request_id: int) -> None:
        """The first token of a request goes out."""
        ...

    def moved(self, request: Request, replica: Replica) -> None:
        """A request goes on in another replica."""
        ...

    def returned(self, request_id: int, replica: Replica) -> None:
        """A request is back where it was: no other replica has it."""
        ...

    def released(self, replica: Replica, request: Request, num_sends: int) -> None:
        """A replica has freed what it held of a request that goes on, or has ended, elsewhere.

        num_sends: as it was when the KV transfer from there began.
        """
        ...

    def refuse(self, request: Request, reason: str) -> None:
        """An attempt has failed because the decode replica cannot go on with it."""
        ...

    def restart(self, request_id: int, *, is_resend: bool = True) -> None:
        """No replica has a request any more: it goes on behind the tokens that went out, or from scratch."""
        ...
