"""Attachments of the gateway: they are called on the events of requests there, and may decide about them.

A run attaches the parts that it needs: clients that time out, an admission policy, prefill pools, crashes. A
gateway without attachments only routes every request to a replica.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.cluster.request_attempt import RequestAttempt
from sim.engine.replica import Replica


class GatewayAttachment:
    """The events of a gateway. A method that a subclass does not override is never called."""

    def asks(self, attempt: RequestAttempt) -> None:
        """A client is about to send its request, for the first time or as a retry."""

    def arrived(self, attempt: RequestAttempt) -> None:
        """A request has arrived for the first time: it is under way now, or has ended already."""

    def candidates(self, attempt: RequestAttempt, serving: list[Replica], now: float) -> list[Replica] | None:
        """The replicas that the router may choose from, of those that serve a request.

        None: the attachment has refused the request, and has failed it at the gateway.
        """
        return serving

    def sends(self, attempt: RequestAttempt, replica: Replica, request: Request) -> bool:
        """The router has chosen a replica; returns whether the attachment has submitted the request itself.

        Raises RejectedError for a request that could not be served from there.
        """
        return False

    def ends(self, attempt: RequestAttempt, replica: Replica, seq: Sequence) -> bool:
        """A replica has ended a request; returns whether it was no answer, and the attachment handles it."""
        return False

    def failing(self, attempt: RequestAttempt) -> None:
        """An attempt of a client is about to fail."""

    def will_retry(self, attempt: RequestAttempt, retry_after_s: float | None) -> bool:
        """An attempt has failed; returns whether its client will retry."""
        return False

    def aborts(self, request_id: int) -> None:
        """A replica is about to be told to abort a request."""

    def left(self, attempt: RequestAttempt, now: float) -> None:
        """An attempt is over, answered or not."""

    def fleet_changed(self) -> None:
        """A replica takes requests from now on, or one that was starting will not come."""


class GatewayListeners:
    """The functions that a gateway calls, by event."""

    def __init__(self) -> None:
        self.asks: tuple[Callable[[RequestAttempt], None], ...] = ()
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
        """Add an attachment; it is called after those added before."""
        for event, called in list(vars(self).items()):
            if getattr(type(attachment), event) is not getattr(GatewayAttachment, event):
                setattr(self, event, (*called, getattr(attachment, event)))
