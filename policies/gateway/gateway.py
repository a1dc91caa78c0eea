"""The gateway between clients and replicas: admits or refuses requests and sends them to replicas.

    client --arrive--> admission --admit--> routing --> replica --answer--> client
              ^            |                   ^           |
              |         refused                +--- resend | its replica crashed
              +-- retry, after a delay ------- timed out --+

A request that no replica can serve now is held if a replica is starting, and dispatched when that replica
serves; otherwise it is refused. A client gets one response regardless of the number of replicas that worked
on it, and the times of a request count from its first arrival. `Gateway` implements the path of a request to
a replica and back, and to another replica after a crash. All other parts of the diagram are added by
`attach`: handlers that are called on the gateway's events, with the current attempt of a request, and may
decide about requests. A run attaches the parts that it needs: clients that time out, an admission policy
(`AdmissionControl`), prefill pools. A gateway without attachments only routes every request to a replica, by
one router per model (`Routers`).

Type parameters: R, the replicas; A, an arriving request; S, a finished request. The gateway never waits and
uses only the clock passed to it, so the simulator and the fleet of real engines drive the same object: they
call `arrive`, `first_token`, `end`, `lost` and `fleet_changed`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from math import inf
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from policies.admission import Admission, AdmissionTraits, Refusal
from policies.core.limits import RejectedError, StopAfter
from policies.core.request import Request
from policies.prediction import LengthPredictor
from policies.routing import ReplicaView, Routing, RoutingTraits, chosen
from policies.user_code import returned, traits_of


class GatewayReplica(ReplicaView, Protocol):
    """A replica to which a gateway sends requests."""

    def submit(self, request: Request, stop_after: StopAfter) -> None:
        """Accepts a request. Raises RejectedError if the engine can never serve it.

        stop_after: output tokens after which it ends, if known; policies do not see it.
        """
        ...

    def abort(self, request_id: int) -> None:
        """Aborts a request; its end follows, possibly after an iteration."""
        ...


class Arriving(Protocol):
    """A request that arrives."""

    @property
    def request(self) -> Request:
        """The part that is visible to policies and engines."""
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
        """Returns whether a replica for a model is starting; starts one if there is none."""
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
        """Adds time during which no replica had the request."""

    def fail(self, reason: str) -> None:
        """Counts a failed attempt."""

    def reject(self, request_id: int, reason: str, now: float) -> None:
        """Ends a request that is not served."""

    def abandon(self, request_id: int, now: float) -> None:
        """Ends a request that its client has abandoned and that no replica has."""

    def lose(self, request_id: int, *, in_crash: bool) -> None:
        """Drops the tokens of a request that restarts."""

    def forget_kv_transfer(self, request_id: int) -> None:
        """Drops the record of a KV transfer that a crash or a timeout has invalidated."""


MIN_AGE_S = 1e-6


def check_age(age_s: float) -> None:
    """Raises ValueError unless age_s is 0 or a finite number of at least MIN_AGE_S seconds."""
    if age_s and not MIN_AGE_S <= age_s < inf:
        raise ValueError(f"signal_age_s={age_s}: must be 0 or a finite number >= {MIN_AGE_S:g} s")


class RequestAttempt(Generic[R, A]):
    """The state of a request in progress: the replica that has it, and the number of the current attempt.

    An attempt begins when the client sends the request. One object serves all attempts of a request.
    """

    number = 1
    """Number of the attempt: 1 for the first, 2 for the first retry."""
    replica: R | None = None
    """The replica that has the request; None: it is held at the gateway, or its client waits to retry."""
    on_routed_end: Callable[[Request, float], None] | None = None
    """Notifies the router that the request has ended on the chosen replica; None: the router has no such
    hook.
    """
    num_resends = 0
    """Number of times that the gateway has resent the request after crashes in this attempt."""
    is_resumed = False
    """Whether the request continues after the tokens that a crashed replica has produced."""
    is_admitted = False
    """Whether the admission policy has admitted this attempt."""
    has_token = False
    """Whether this attempt has its first token, from any replica; set only if a policy or client needs it."""
    is_timed_out = is_given_up = False
    """Whether the attempt is being aborted: timed out (the client may retry) or given up."""

    def __init__(self, arrival: A, now: float) -> None:
        self.arrival = arrival
        self.stop_after: StopAfter = arrival.stop_after
        """Output tokens after which the request ends; policies do not see it."""
        self.first_arrival_s = self.held_since_s = now
        """Time of the first attempt in seconds, and the time since when no replica has had the request."""

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
        """Handles a new request after its first attempt: it is in progress, or has already ended."""

    def candidates(self, attempt: RequestAttempt[R, A], serving: list[R], now: float) -> list[R] | None:
        """Returns the replicas from which the router may choose, among those that serve the request's model.

        None: the attachment has refused the request and failed the attempt at the gateway.
        """
        return serving

    def sends(self, attempt: RequestAttempt[R, A], replica: R, request: Request) -> bool:
        """Handles the choice of a replica; returns True if the attachment has submitted the request to it.

        Raises RejectedError for a request that can never be served by that choice.
        """
        return False

    def first_token(self, attempt: RequestAttempt[R, A], now: float) -> None:
        """Handles the first token of a request from a replica.

        has_token: whether the request had one before.
        """

    def ends(self, attempt: RequestAttempt[R, A], replica: R, seq: S) -> bool:
        """Handles the end of a request on a replica; returns True if the request continues elsewhere."""
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
        """Handles a replica that begins to serve, or a starting replica that was stopped."""


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
        """Adds the handlers that an attachment overrides; they are called after earlier ones."""
        add_handlers(self, attachment, GatewayAttachment)


def add_handlers(listeners: object, attachment: object, interface: type[Any]) -> None:
    """Appends the methods of `interface` that an attachment overrides to the tuples of the same names."""
    for event, called in list(vars(listeners).items()):
        if getattr(type(attachment), event) is not getattr(interface, event):
            setattr(listeners, event, (*called, getattr(attachment, event)))


class Router(NamedTuple):
    """A routing policy with its entry point and its optional event handlers."""

    policy: Routing
    choose: Callable[[Request, Sequence[ReplicaView], float], int]
    on_first_token: Callable[[Request, float], None] | None
    on_end: Callable[[Request, float], None] | None


class Routers(dict[str | None, Router]):
    """Copies of one policy, one per model; requests that name no model share the policy itself.

    length_predictions: passes predicted output lengths to a policy that needs them.
    """

    def __init__(
        self, routing: Routing, length_predictions: LengthPredictions[Any, Any, Any] | None = None
    ) -> None:
        super().__init__()
        self._routing = routing
        self._length_predictions = length_predictions

    @property
    def see_first_tokens(self) -> bool:
        """True if the policy has a handler of first tokens."""
        return traits_of(self._routing, RoutingTraits).on_first_token is not None

    def __missing__(self, model: str | None) -> Router:
        policy = self._routing if model is None else deepcopy(self._routing)
        choose, traits = policy.choose, traits_of(policy, RoutingTraits)
        if traits.needs_predictor:
            assert self._length_predictions is not None
            choose = partial(self._length_predictions.choose, policy)
        router = self[model] = Router(policy, choose, traits.on_first_token, traits.on_end)
        return router


class LengthPredictions(GatewayAttachment[R, A, S]):
    """Predicted output lengths of requests, from a predictor that learns from complete requests.

    attempts: the attempts in progress, by request id. true_length: the true output length of a request, for a
    predictor that needs it. output_length: the output length of a complete request; None for any other end.
    """

    def __init__(
        self,
        predictor: LengthPredictor,
        attempts: Mapping[int, RequestAttempt[R, A]],
        *,
        true_length: Callable[[A], int],
        output_length: Callable[[int], int | None],
    ) -> None:
        self._predictor = predictor
        self._attempts = attempts
        self._true_length = true_length
        self._output_length = output_length

    def predict_for(self, routing: Routing, request: Request) -> None:
        """Passes the predicted output length of a request to a routing policy."""
        predictor = self._predictor
        attempt = self._attempts[request.request_id]
        truth = self._true_length(attempt.arrival) if predictor.needs_truth else None
        routing.on_predicted(request, predictor.predict(request, truth))  # type: ignore[attr-defined]

    def choose(self, routing: Routing, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the choice of a routing policy, after passing it the predicted output length."""
        self.predict_for(routing, request)
        return routing.choose(request, replicas, now)

    def left(self, attempt: RequestAttempt[R, A], now: float) -> None:
        request = attempt.arrival.request
        num_tokens = self._output_length(request.request_id)
        if num_tokens is not None:
            self._predictor.observe(request, num_tokens)


UNSERVABLE = "can never be served"
"""The reason under which permanently unservable requests are counted; their full reasons differ."""
CRASHED = "its replica crashed"
"""The reason of an attempt that was resent the maximum number of times."""


class Gateway(Generic[R, A, S]):
    """The gateway of a run. on_end is called with every request that has ended.

    attempts: the attempts in progress, by request id. max_resends: maximum number of resends of an attempt
    after crashes of its replica. keeps_tokens: whether a resent request continues after the tokens that its
    client has, instead of starting from scratch.
    """

    def __init__(
        self,
        routers: Routers,
        *,
        clock: Now,
        requests: GatewayLog,
        attempts: dict[int, RequestAttempt[R, A]],
        on_end: Callable[[Request], None],
        max_resends: int,
        keeps_tokens: bool,
    ) -> None:
        self.fleet: Serving[R]  # set by its owner, because the replicas report to this gateway
        self.attempts = attempts
        self._routers = routers
        self._held: dict[int, RequestAttempt[R, A]] = {}  # attempts that wait for a replica
        self._clock = clock
        self._requests = requests
        self._on_end = on_end
        self._max_resends = max_resends
        self._keeps_tokens = keeps_tokens
        self._listeners: GatewayListeners[R, A, S] = GatewayListeners()

    def attach(self, attachment: GatewayAttachment[R, A, S]) -> None:
        """Attaches a listener to the events of the gateway; it is called after earlier ones."""
        self._listeners.add(attachment)

    # Requests arrive.

    def arrive(self, arrival: A) -> None:
        """Opens the record of a new request, and submits its first attempt."""
        request, requests = arrival.request, self._requests
        requests.arrive(request)
        requests.begin_try(request.request_id, 1)
        attempt = self.attempts[request.request_id] = RequestAttempt(arrival, self._clock.now)
        self.submit(attempt)
        for notify in self._listeners.arrived:
            notify(attempt)

    def submit(self, attempt: RequestAttempt[R, A]) -> None:
        """Submits an attempt of a client, the first or a retry, to admission and routing."""
        for notify in self._listeners.submitted:
            notify(attempt)
        self.dispatch(attempt)

    def dispatch(self, attempt: RequestAttempt[R, A]) -> None:
        """Admits an attempt, unless it is already admitted, and sends it to the chosen replica."""
        now, request, listeners = self._clock.now, attempt.arrival.request, self._listeners
        candidates = self.fleet.serving_model[request.model]
        if not candidates:
            self._wait_for_replica(attempt)
            return
        for candidates_of in listeners.candidates:
            allowed = candidates_of(attempt, candidates, now)
            if allowed is None:
                return
            candidates = allowed
        policy, choose, _, attempt.on_routed_end = self._routers[request.model]
        attempt.replica = replica = chosen(policy, choose(request, candidates, now), candidates)
        self._requests.send(request.request_id, replica.index)
        if now > attempt.first_arrival_s:
            self._record_held_time(attempt, now)
            request = request._replace(arrival_s=now)  # the time at which the engine gets it
        try:
            for sends in listeners.sends:
                if sends(attempt, replica, request):
                    return
            replica.submit(request, attempt.stop_after)
        except RejectedError as error:
            self.release(attempt)
            self.fail(attempt, str(error), inf)

    def _wait_for_replica(self, attempt: RequestAttempt[R, A]) -> None:
        """Holds a request until a starting replica can serve it.

        Fails the attempt if no replica is starting.
        """
        request = attempt.arrival.request
        if self.fleet.will_serve(request.model):
            self._held[request.request_id] = attempt
        else:
            self.fail(attempt, "no replica takes requests")

    def fleet_changed(self) -> None:
        """Dispatches the held requests after a replica begins to serve or a starting one was stopped."""
        for notify in self._listeners.fleet_changed:
            notify()
        held, self._held = self._held, {}
        for attempt in held.values():
            self.dispatch(attempt)

    # Requests progress and end.

    def first_token(self, request_id: int) -> None:
        """Notifies the policies of the first token of a request, from any replica."""
        attempt, now = self.attempts[request_id], self._clock.now
        notify_router = self._routers[attempt.arrival.request.model].on_first_token
        if notify_router is not None:
            notify_router(attempt.arrival.request, now)
        for notify in self._listeners.first_token:
            notify(attempt, now)
        attempt.has_token = True

    def end(self, seq: S) -> None:
        """Handles the end of a request on its replica: it is complete, or was aborted there."""
        attempt = self.attempts[seq.request_id]
        replica = attempt.replica
        assert replica is not None
        self.release(attempt)
        for handles in self._listeners.ends:
            if handles(attempt, replica, seq):
                return
        self._ended(attempt)

    def lost(self, request_id: int, *, is_resend: bool = True) -> None:
        """Restarts a request that no replica has any more, after its streamed tokens or from scratch.

        is_resend: whether the cause is a crash of its replica, not of the replica with a copy of its KV. An
        attempt that has reached the maximum number of resends fails.
        """
        attempt = self.attempts[request_id]
        self.release(attempt)
        self._requests.forget_kv_transfer(request_id)
        is_sent = not attempt.has_left and (not is_resend or attempt.num_resends < self._max_resends)
        has_branches = attempt.arrival.request.branching is not None
        attempt.is_resumed = is_sent and self._keeps_tokens and not has_branches
        if not attempt.is_resumed:
            self._requests.lose(request_id, in_crash=True)
        if attempt.is_given_up:
            self.abandon(attempt)
        elif attempt.is_timed_out:
            self.fail(attempt, "timed out")
        elif is_sent:
            attempt.num_resends += is_resend
            self._requests.num_resends += is_resend
            self.dispatch(attempt)
        else:
            self.fail(attempt, CRASHED)

    def release(self, attempt: RequestAttempt[R, A]) -> None:
        """Marks a request as held by no replica."""
        attempt.replica, attempt.held_since_s = None, self._clock.now
        if attempt.on_routed_end is not None:
            self.notify_router(attempt)

    def notify_router(self, attempt: RequestAttempt[R, A]) -> None:
        """Notifies the router that a request has ended on the replica that it chose."""
        if attempt.on_routed_end is not None:
            attempt.on_routed_end(attempt.arrival.request, self._clock.now)
            attempt.on_routed_end = None

    def fail(self, attempt: RequestAttempt[R, A], reason: str, retry_after_s: float | None = None) -> None:
        """Fails an attempt: its client retries, or the request is rejected.

        retry_after_s: as in `policies.admission.Refusal`.
        """
        request, now = attempt.arrival.request, self._clock.now
        for notify in self._listeners.failing:
            notify(attempt)
        for notify_left in self._listeners.left:
            notify_left(attempt, now)
        self._record_held_time(attempt, now)
        self._requests.fail(UNSERVABLE if retry_after_s == inf else reason)
        for will_retry in self._listeners.will_retry:
            if will_retry(attempt, retry_after_s):
                return
        del self.attempts[request.request_id]
        self._requests.reject(request.request_id, reason, now)
        self._on_end(request)

    def abort(self, replica: R, attempt: RequestAttempt[R, A]) -> None:
        """Aborts a request on a replica; this may take until the end of an iteration."""
        request_id = attempt.arrival.request.request_id
        for notify in self._listeners.aborts:
            notify(request_id)
        replica.abort(request_id)

    def give_up(self, attempt: RequestAttempt[R, A]) -> None:
        """Ends a request in progress that its client has given up for good."""
        if attempt.replica is not None:
            attempt.is_given_up, attempt.is_timed_out = True, False
            self.abort(attempt.replica, attempt)
            return
        self.stop_holding(attempt)
        self.abandon(attempt)

    def stop_holding(self, attempt: RequestAttempt[R, A]) -> bool:
        """Stops holding a request for a replica; returns whether it was held."""
        return self._held.pop(attempt.arrival.request.request_id, None) is not None

    def abandon(self, attempt: RequestAttempt[R, A]) -> None:
        """Ends a request that its client has abandoned and that no replica has."""
        self._record_held_time(attempt, self._clock.now)
        self._requests.abandon(attempt.arrival.request.request_id, self._clock.now)
        self._ended(attempt)

    def stop(self, end_s: float) -> None:
        """Records, at the end of the run, how long requests without a replica were held."""
        for attempt in self.attempts.values():
            if attempt.replica is None:
                self._record_held_time(attempt, end_s)

    def _ended(self, attempt: RequestAttempt[R, A]) -> None:
        """Removes a request that is complete or was abandoned, and notifies the listeners."""
        request = attempt.arrival.request
        del self.attempts[request.request_id]
        for notify in self._listeners.left:
            notify(attempt, self._clock.now)
        self._on_end(request)

    def _record_held_time(self, attempt: RequestAttempt[R, A], now: float) -> None:
        """Records the time during which no replica had the request."""
        if now > attempt.held_since_s:
            self._requests.hold(attempt.arrival.request.request_id, now - attempt.held_since_s)
            attempt.held_since_s = now


class AdmissionControl(GatewayAttachment[R, A, S]):
    """Calls the admission policy once per attempt, and reports the end of admitted attempts to it."""

    def __init__(self, admission: Admission, gateway: Gateway[R, A, S]) -> None:
        self._admission = admission
        self._gateway = gateway
        traits = traits_of(admission, AdmissionTraits)
        self._on_first_token, self._on_end = traits.on_first_token, traits.on_end

    @property
    def sees_first_tokens(self) -> bool:
        """True if the policy has a handler of first tokens."""
        return self._on_first_token is not None

    def candidates(self, attempt: RequestAttempt[R, A], serving: list[R], now: float) -> list[R] | None:
        if attempt.is_admitted:
            return serving
        refusal = self._admission.refusal(attempt.arrival.request, serving, now)
        if refusal is not None:
            if not isinstance(refusal, Refusal):
                rule = "must return None, which admits the request, or a policies.admission.Refusal"
                raise returned(self._admission, "refusal", refusal, rule)
            self._gateway.fail(attempt, refusal.reason, refusal.retry_after_s)
            return None
        attempt.is_admitted = True
        return serving

    def first_token(self, attempt: RequestAttempt[R, A], now: float) -> None:
        if self._on_first_token is not None and not attempt.has_token:
            self._on_first_token(attempt.arrival.request, now)

    def left(self, attempt: RequestAttempt[R, A], now: float) -> None:
        if attempt.is_admitted and self._on_end is not None:
            self._on_end(attempt.arrival.request, now)
        attempt.is_admitted = False
