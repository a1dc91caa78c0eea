"""Attachments of a gateway, the state of a request in progress, and what a gateway needs from its world.

Attachments are handlers that are called on the gateway's events and may decide about requests. They are given
the current attempt of a request, which is its state at the gateway.

Types: R, the replicas of a world; A, what it knows of a request that arrives; S, of one that ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from policies.core.limits import StopAfter
from policies.core.request import Request
from policies.routing import ReplicaView


class GatewayReplica(ReplicaView, Protocol):
    """A replica to which a gateway sends requests."""

    def submit(self, request: Request, stop_after: StopAfter) -> None:
        """Accepts a request. Raises RejectedError if the engine can never serve it.

        stop_after: output tokens after which it ends, if the world knows; policies do not see it.
        """
        ...

    def abort(self, request_id: int) -> None:
        """Aborts a request; its end follows, perhaps after an iteration."""
        ...


class Arriving(Protocol):
    """A request that arrives."""

    @property
    def request(self) -> Request:
        """The part that policies and engines may see."""
        ...

    @property
    def stop_after(self) -> StopAfter:
        """Output tokens after which the request ends; None: unknown. Policies do not see it."""
        ...


class Ending(Protocol):
    """A request that has ended on its replica."""

    @property
    def request_id(self) -> int:
        """The id of the request."""
        ...


R = TypeVar("R", bound=GatewayReplica)
A = TypeVar("A", bound=Arriving)
S = TypeVar("S", bound=Ending)


class Now(Protocol):
    """A clock that can be read."""

    @property
    def now(self) -> float:
        """The present time in seconds."""
        ...


class Serving(Protocol[R]):
    """The replicas behind a gateway."""

    @property
    def serving_model(self) -> Mapping[str | None, list[R]]:
        """The replicas that accept requests, by the name of their model; None: all of them."""
        ...

    def will_serve(self, model: str | None) -> bool:
        """Returns whether a replica for a model is starting, after starting one if none is left."""
        ...


class GatewayLog(Protocol):
    """Records what happens to requests at a gateway; times in seconds on its clock."""

    num_resends: int
    """Number of requests that were sent again after a crash."""

    def arrive(self, request: Request) -> None:
        """Opens the record of a request."""

    def begin_try(self, request_id: int, number: int) -> None:
        """Records the attempt of a client, from 1."""

    def send(self, request_id: int, replica: int) -> None:
        """Records the replica that a request is sent to."""

    def hold(self, request_id: int, held_s: float) -> None:
        """Adds time for which no replica has had a request."""

    def fail(self, reason: str) -> None:
        """Counts a failed attempt."""

    def reject(self, request_id: int, reason: str, now: float) -> None:
        """Ends a request that is not served."""

    def abandon(self, request_id: int, now: float) -> None:
        """Ends a request that its client has abandoned and that no replica has."""

    def lose(self, request_id: int, *, in_crash: bool) -> None:
        """Drops the tokens of a request, which begins again."""

    def forget_kv_transfer(self, request_id: int) -> None:
        """Drops the record of a KV transfer that a crash or a timeout has undone."""


class RequestAttempt(Generic[R, A]):
    """The state of a request in progress: the replica that has it, and the number of the current attempt.

    An attempt begins when the client sends the request. One object serves all attempts of a request.
    """

    number = 1
    """Number of the attempt: 1 for the first, 2 for the first retry."""
    replica: R | None = None
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

    def __init__(self, arrival: A, now: float) -> None:
        self.arrival = arrival
        self.stop_after: StopAfter = arrival.stop_after
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


class GatewayAttachment(Generic[R, A, S]):
    """Handlers of the events of a gateway. A method that a subclass does not override is never called."""

    def submitted(self, attempt: RequestAttempt[R, A]) -> None:
        """Handles an attempt that a client submits, the first or a retry; it is not admitted yet."""

    def arrived(self, attempt: RequestAttempt[R, A]) -> None:
        """Handles a new request after its first attempt: it is in progress, or has ended already."""

    def candidates(self, attempt: RequestAttempt[R, A], serving: list[R], now: float) -> list[R] | None:
        """Returns the replicas from which the router may choose, of those that serve the model of a request.

        None: the attachment has refused the request, and has failed the attempt at the gateway.
        """
        return serving

    def sends(self, attempt: RequestAttempt[R, A], replica: R, request: Request) -> bool:
        """Handles the choice of a replica; returns true if the attachment has submitted the request to it.

        Raises RejectedError for a request that can never be served by that choice.
        """
        return False

    def first_token(self, attempt: RequestAttempt[R, A], now: float) -> None:
        """Handles the first token of a request from a replica; has_token: whether it had one before."""

    def ends(self, attempt: RequestAttempt[R, A], replica: R, seq: S) -> bool:
        """Handles the end of a request on a replica; returns true if the request does not end with it."""
        return False

    def failing(self, attempt: RequestAttempt[R, A]) -> None:
        """Handles an attempt of a client that is about to fail."""

    def will_retry(self, attempt: RequestAttempt[R, A], retry_after_s: float | None) -> bool:
        """Returns whether the client of a failed attempt will retry."""
        return False

    def aborts(self, request_id: int) -> None:
        """Handles a request that is about to be aborted on its replica."""

    def left(self, attempt: RequestAttempt[R, A], now: float) -> None:
        """Handles an attempt that has ended, complete or not."""

    def fleet_changed(self) -> None:
        """Handles a replica that has begun to serve, or a starting replica that was stopped."""


class GatewayListeners(Generic[R, A, S]):
    """The functions that a gateway calls, by event."""

    def __init__(self) -> None:
        self.submitted: tuple[Callable[[RequestAttempt[R, A]], None], ...] = ()
        self.arrived: tuple[Callable[[RequestAttempt[R, A]], None], ...] = ()
        self.candidates: tuple[Callable[[RequestAttempt[R, A], list[R], float], list[R] | None], ...] = ()
        self.sends: tuple[Callable[[RequestAttempt[R, A], R, Request], bool], ...] = ()
        self.first_token: tuple[Callable[[RequestAttempt[R, A], float], None], ...] = ()
        self.ends: tuple[Callable[[RequestAttempt[R, A], R, S], bool], ...] = ()
        self.failing: tuple[Callable[[RequestAttempt[R, A]], None], ...] = ()
        self.will_retry: tuple[Callable[[RequestAttempt[R, A], float | None], bool], ...] = ()
        self.aborts: tuple[Callable[[int], None], ...] = ()
        self.left: tuple[Callable[[RequestAttempt[R, A], float], None], ...] = ()
        self.fleet_changed: tuple[Callable[[], None], ...] = ()

    def add(self, attachment: GatewayAttachment[R, A, S]) -> None:
        """Adds the handlers that an attachment overrides, to be called after those added before."""
        add_handlers(self, attachment, GatewayAttachment)


def add_handlers(listeners: object, attachment: object, interface: type[Any]) -> None:
    """Appends the methods of `interface` that an attachment overrides to the tuples of their names."""
    for event, called in list(vars(listeners).items()):
        if getattr(type(attachment), event) is not getattr(interface, event):
            setattr(listeners, event, (*called, getattr(attachment, event)))
