"""Attachments of the gateway: handlers that are called on its events and may decide about requests.

A run attaches the parts that it needs: clients that time out, an admission policy, prefill pools, crashes. A
gateway without attachments only routes every request to a replica.

They are given the current attempt of a request, which is its state at the gateway.
"""

from __future__ import annotations

from collections.abc import Callable

from policies.core.limits import StopAfter
from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.engine.attachment import add_handlers
from sim.engine.replica import Replica
from sim.workload.base import Arrival


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


class RequestAttempt:
    """The state of a request in progress: the replica that has it, and the number of the current attempt.

    An attempt begins when the client sends the request. One object serves all attempts of a request.
    """

    number = 1
    """Number of the attempt: 1 for the first, 2 for the first retry."""
    replica: Replica | None = None
    """The replica that has the request; None: it is held at the gateway, or its client waits to retry."""
    on_routed_end: Callable[[Request, float], None] | None = None
    """Notifies the router that the request has ended on the chosen replica; None: it has no such hook."""
    num_resends = 0
    """Number of times that the gateway has resent the request in this attempt, after crashes."""
    is_resumed = False
    """Whether the request continues after the tokens that a crashed replica has produced."""
    is_admitted = False
    """Whether the admission policy has admitted this attempt."""
    has_token = False
    """Whether this attempt has its first token, from any replica; set only if a policy or client needs it."""
    is_timed_out = is_given_up = False
    """Whether the attempt is being aborted: timed out, after which the client may retry, or given up."""

    def __init__(self, arrival: Arrival, now: float) -> None:
        self.arrival = arrival
        self.stop_after: StopAfter = arrival.sample_tokens or arrival.num_output_tokens
        """Output tokens after which the request ends; policies do not see it."""
        self.first_arrival_s = self.held_since_s = now
        """Time of the first attempt in seconds, and the time since which no replica has had the request."""

    def begin_retry(self) -> None:
        """Begins the next attempt, a retry of the client."""
        self.number += 1
        self.num_resends = 0
        self.has_token = self.is_timed_out = self.is_resumed = False

    @property
    def has_left(self) -> bool:
        """True if the client has given up or timed out."""
        return self.is_given_up or self.is_timed_out
