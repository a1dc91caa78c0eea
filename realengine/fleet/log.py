"""The log of a fleet's gateway: tells readers what happens to their requests, and a log of the caller."""

from __future__ import annotations

from math import inf

from policies.core.request import Request
from policies.gateway.gateway import GatewayLog
from realengine.fleet.request import EngineLostError, FleetRequest, RefusedError


class FleetLog:
    """A `GatewayLog`. requests: those in progress, by number."""

    def __init__(self, requests: dict[int, FleetRequest]) -> None:
        self.num_resends = 0
        self.further: GatewayLog | None = None
        """The log of a caller, which is told the same."""
        self._requests = requests

    def arrive(self, request: Request) -> None:
        if self.further is not None:
            self.further.arrive(request)

    def begin_try(self, request_id: int, number: int) -> None:
        if self.further is not None:
            self.further.begin_try(request_id, number)

    def send(self, request_id: int, replica: int) -> None:
        if self.further is not None:
            self.further.send(request_id, replica)

    def hold(self, request_id: int, held_s: float) -> None:
        if self.further is not None:
            self.further.hold(request_id, held_s)

    def fail(self, reason: str) -> None:
        if self.further is not None:
            self.further.fail(reason)

    def reject(self, request_id: int, reason: str, now: float) -> None:
        """Fails the request for its reader: with ValueError if no engine can ever serve it."""
        own = self._requests[request_id]
        is_unservable = own.retry_after_s == inf
        own.fail(ValueError(reason) if is_unservable else RefusedError(reason, own.retry_after_s))
        if self.further is not None:
            self.further.reject(request_id, reason, now)

    def abandon(self, request_id: int, now: float) -> None:
        """Ends the request for its reader as it is."""
        self._requests[request_id].abort()
        if self.further is not None:
            self.further.abandon(request_id, now)

    def lose(self, request_id: int, *, in_crash: bool) -> None:
        """Drops the tokens of a request; a reader that has seen some gets EngineLostError."""
        own = self._requests[request_id]
        own.lose(EngineLostError("its engine has died after it had sent tokens, and the output begins again"))
        if self.further is not None:
            self.further.lose(request_id, in_crash=in_crash)

    def forget_kv_transfer(self, request_id: int) -> None:
        """Does nothing: engines of a fleet transfer no KV."""
