"""What happens to requests at the gateway of a fleet: told to their readers, and to a log of the caller."""

from __future__ import annotations

from math import inf

from policies.core.request import Request
from policies.gateway.attachments import GatewayLog
from realengine.fleet.request import EngineLostError, FleetRequest, RefusedError


class FleetLog:
    """A `GatewayLog`. requests: those in progress, by number. log: of the caller; None: there is none."""

    def __init__(self, requests: dict[int, FleetRequest], log: GatewayLog | None) -> None:
        self.num_resends = 0
        self._requests = requests
        self._log = log

    def arrive(self, request: Request) -> None:
        if self._log is not None:
            self._log.arrive(request)

    def begin_try(self, request_id: int, number: int) -> None:
        if self._log is not None:
            self._log.begin_try(request_id, number)

    def send(self, request_id: int, replica: int) -> None:
        if self._log is not None:
            self._log.send(request_id, replica)

    def hold(self, request_id: int, held_s: float) -> None:
        if self._log is not None:
            self._log.hold(request_id, held_s)

    def fail(self, reason: str) -> None:
        if self._log is not None:
            self._log.fail(reason)

    def reject(self, request_id: int, reason: str, now: float) -> None:
        """Fails the request for its reader: with ValueError if no engine can ever serve it."""
        own = self._requests[request_id]
        is_unservable = own.retry_after_s == inf
        own.fail(ValueError(reason) if is_unservable else RefusedError(reason, own.retry_after_s))
        if self._log is not None:
            self._log.reject(request_id, reason, now)

    def abandon(self, request_id: int, now: float) -> None:
        """Ends the request for its reader as it is."""
        self._requests[request_id].abort()
        if self._log is not None:
            self._log.abandon(request_id, now)

    def lose(self, request_id: int, *, in_crash: bool) -> None:
        """Drops the tokens of a request; a reader that has seen some gets EngineLostError."""
        own = self._requests[request_id]
        own.lose(EngineLostError("its engine has died after it had sent tokens, and the output begins again"))
        if self._log is not None:
            self._log.lose(request_id, in_crash=in_crash)

    def forget_kv_transfer(self, request_id: int) -> None:
        """Does nothing: engines of a fleet transfer no KV."""
