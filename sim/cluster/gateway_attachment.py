"""Attachments of the gateway: they are called on the events of requests there, and may decide about them.

A run attaches what it has: clients without patience, an admission policy, prefill pools, crashes. A gateway
without any of these chooses a replica for every request, and does nothing else.
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
        """A client is about to send its request, perhaps again."""

    def arrived(self, attempt: RequestAttempt) -> None:
        """A request has come for the first time: it is under way now, or is over already."""

    def candidates(self, attempt: RequestAttempt, serving: list[Replica], now: float) -> list[Replica] | None:
        """Of the replicas that serve a request, those that the router may choose from.

        None: the attachment has not let the request in, and has told the gateway that it failed.
        """
        return serving

    def sends(self, attempt: RequestAttempt, replica: Replica, request: Request) -> bool:
        """The router has chosen a replica; whether the attachment has given it the request itself.

        Raises RejectedError for a request that could not be served from there.
        """
        return False

    def ends(self, attempt: RequestAttempt, replica: Replica, seq: Sequence) -> bool:
        """A replica is done with a request; whether that was no answer, and the attachment deals with it."""
        return False

    def failing(self, attempt: RequestAttempt) -> None:
        """An attempt of a client is about to fail."""

    def comes_again(self, attempt: RequestAttempt, retry_after_s: float | None) -> bool:
        """An attempt has failed; whether its client will send the request again."""
        return False

    def aborts(self, request_id: int) -> None:
        """A replica is about to be told to drop a request."""

    def left(self, attempt: RequestAttempt, now: float) -> None:
        """An attempt is over, whether it was answered or not."""

    def fleet_changed(self) -> None:
        """A replica takes requests from now on, or one that was on its way will not come."""


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
        self.comes_again: tuple[Callable[[RequestAttempt, float | None], bool], ...] = ()
        self.aborts: tuple[Callable[[int], None], ...] = ()
        self.left: tuple[Callable[[RequestAttempt, float], None], ...] = ()
        self.fleet_changed: tuple[Callable[[], None], ...] = ()

    def add(self, attachment: GatewayAttachment) -> None:
        """Call an attachment, behind those that were added before."""
        for event, called in list(vars(self).items()):
            if getattr(type(attachment), event) is not getattr(GatewayAttachment, event):
                setattr(self, event, (*called, getattr(attachment, event)))
