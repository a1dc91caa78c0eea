"""Attachments of the gateway: handlers that are called on its events and may decide about requests.

A run attaches the parts that it needs: clients that time out, an admission policy, prefill pools, crashes. A
gateway without attachments only routes every request to a replica.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.cluster.request_attempt import RequestAttempt
from sim.engine.attachment import add_handlers
from sim.engine.replica import Replica


class GatewayAttachment:
    """Handlers of the events of a gateway. A method that a subclass does not override is never called."""

    def submitted(self, attempt: RequestAttempt) -> None:
        """Handles an attempt that a client submits, the first or a retry; it is not admitted yet."""

    def arrived(self, attempt: RequestAttempt) -> None:
        """Handles a new request after its first attempt: it is in progress, or has ended already."""

    def candidates(self, attempt: RequestAttempt, serving: list[Replica], now: float) -> list[Replica] | None:
        """Returns the replicas from which the router may choose, of those that serve the model of a request.

        None: the attachment has refused the request, and has failed the attempt at the gateway.
        """
        return serving

    def sends(self, attempt: RequestAttempt, replica: Replica, request: Request) -> bool:
        """Handles the choice of a replica; returns true if the attachment has submitted the request to it.

        Raises RejectedError for a request that can never be served by that choice.
        """
        return False

    def ends(self, attempt: RequestAttempt, replica: Replica, seq: Sequence) -> bool:
        """Handles the end of a request on a replica; returns true if the request does not end with it."""
        return False

    def failing(self, attempt: RequestAttempt) -> None:
        """Handles an attempt of a client that is about to fail."""

    def will_retry(self, attempt: RequestAttempt, retry_after_s: float | None) -> bool:
        """Returns whether the client of a failed attempt will retry."""
        return False

    def aborts(self, request_id: int) -> None:
        """Handles a request that is about to be aborted on its replica."""

    def left(self, attempt: RequestAttempt, now: float) -> None:
        """Handles an attempt that has ended, complete or not."""

    def fleet_changed(self) -> None:
        """Handles a replica that has begun to serve, or a starting replica that was stopped."""


class GatewayListeners:
    """The functions that a gateway calls, by event."""

    def __init__(self) -> None:
        self.submitted: tuple[Callable[[RequestAttempt], None], ...] = ()
        self.arrived: tuple[Callable[[RequestAttempt], None], ...] = ()
        self.candidates: tuple[
            Callable[[RequestAttempt, list[Replica], float], list[Replica] | None], ...
        ] = ()
        self.sends: tuple[Callable[[RequestAttempt, Replica, Request], bool], ...] = ()
        self.ends: tuple[Callable[[RequestAttempt, Replica, Sequence], bool], ...] = ()
        self.failing: tuple[Callable[[RequestAttempt], None], ...] = ()
        self.will_retry: tuple[Callable[[RequestAttempt, float | None], bool], ...] = ()
        self.aborts: tuple[Callable[[int], None], ...] = ()
        self.left: tuple[Callable[[RequestAttempt, float], None], ...] = ()
        self.fleet_changed: tuple[Callable[[], None], ...] = ()

    def add(self, attachment: GatewayAttachment) -> None:
        """Adds the handlers that an attachment overrides, to be called after those added before."""
        add_handlers(self, attachment, GatewayAttachment)
