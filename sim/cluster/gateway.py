"""The gateway between clients and replicas: admits or refuses requests and sends them to replicas.

    client --arrive--> admission --admit--> routing --> replica --answer--> client
              ^            |                   ^           |
              |         refused                +--- resend | its replica crashed
              +-- retry, after a delay ------- timed out --+

A request that no replica can serve now is held if one is starting, and dispatched when that one serves; else
it is refused. A client gets one response, however many replicas have worked on it, and the times of a request
count from its first arrival.

This module has the path of a request to a replica and back. All other parts of the diagram are attached by
`attach`. One idea in more than 400 lines: behind the gateway stand the interface of its attachments, and the
routing policies that it calls, one per model, each with its own state.

Attachments are handlers that are called on its events and may decide about requests. A run attaches the parts
that it needs: clients that time out, an admission policy, prefill pools, crashes. A gateway without
attachments only routes every request to a replica. They are given the current attempt of a request, which is
its state at the gateway.

Routers that need output lengths have a predictor of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from copy import deepcopy
from functools import partial
from math import inf
from typing import NamedTuple

from policies.core.limits import RejectedError, StopAfter
from policies.core.request import Request
from policies.core.sequence import Sequence
from policies.prediction import LengthPredictor
from policies.routing import ReplicaView, Routing, RoutingTraits, chosen
from policies.user_code import traits_of
from sim.cluster.fleet import Fleet
from sim.engine.attachment import add_handlers
from sim.engine.clock import Clock
from sim.engine.replica import Replica
from sim.records.requests import FINISHED, RequestLog
from sim.workload.base import Arrival

UNSERVABLE = "can never be served"
"""The reason under which requests that no replica can ever serve are counted; their full reasons differ."""


class Gateway:
    """The gateway of a run. on_end is called with every request that has ended.

    attempts: the attempts in progress, by request id.
    """

    def __init__(
        self,
        routers: Routers,
        *,
        clock: Clock,
        requests: RequestLog,
        attempts: dict[int, RequestAttempt],
        on_end: Callable[[Request], None],
    ) -> None:
        self.fleet: Fleet  # set by `GatewayAssembly.connect`, as its replicas report to this gateway
        self.attempts = attempts
        self._routers = routers
        self._held: dict[int, RequestAttempt] = {}  # those of `attempts` that wait for a replica
        self._clock = clock
        self._requests = requests
        self._on_end = on_end
        self._listeners = GatewayListeners()

    def attach(self, attachment: GatewayAttachment) -> None:
        """Attaches a listener to the events of the gateway; it is called after those attached before."""
        self._listeners.add(attachment)

    # Requests arrive.

    def arrive(self, arrival: Arrival) -> None:
        """Opens the record of a new request, and submits its first attempt."""
        request, requests = arrival.request, self._requests
        request_id = request.request_id
        requests.arrive(request)
        requests.tries[request_id] = 1
        attempt = self.attempts[request_id] = RequestAttempt(arrival, self._clock.now)
        self.submit(attempt)
        for notify in self._listeners.arrived:
            notify(attempt)

    def submit(self, attempt: RequestAttempt) -> None:
        """Submits an attempt of a client, the first or a retry, to admission and routing."""
        for notify in self._listeners.submitted:
            notify(attempt)
        self.dispatch(attempt)

    def dispatch(self, attempt: RequestAttempt) -> None:
        """Admits an attempt, unless it is admitted already, and sends it to the chosen replica."""
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

    def _wait_for_replica(self, attempt: RequestAttempt) -> None:
        """Holds a request until a starting replica can serve it; fails the attempt if none is starting."""
        request = attempt.arrival.request
        if self.fleet.will_serve(request.model):
            self._held[request.request_id] = attempt
        else:
            self.fail(attempt, "no replica takes requests")

    def fleet_changed(self) -> None:
        """Dispatches the held requests after a replica has begun to serve or a starting one was stopped."""
        for notify in self._listeners.fleet_changed:
            notify()
        held, self._held = self._held, {}
        for attempt in held.values():
            self.dispatch(attempt)

    # Requests end.

    def end(self, seq: Sequence) -> None:
        """Handles the end of a request on its replica: it is complete, or was aborted there."""
        attempt = self.attempts[seq.request_id]
        replica = attempt.replica
        assert replica is not None
        self.release(attempt)
        for handles in self._listeners.ends:
            if handles(attempt, replica, seq):
                return
        self._ended(attempt)

    def release(self, attempt: RequestAttempt) -> None:
        """Marks a request as held by no replica."""
        attempt.replica, attempt.held_since_s = None, self._clock.now
        if attempt.on_routed_end is not None:
            self.notify_router(attempt)

    def notify_router(self, attempt: RequestAttempt) -> None:
        """Notifies the router that a request has ended on the replica that it chose."""
        if attempt.on_routed_end is not None:
            attempt.on_routed_end(attempt.arrival.request, self._clock.now)
            attempt.on_routed_end = None

    def fail(self, attempt: RequestAttempt, reason: str, retry_after_s: float | None = None) -> None:
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

    def abort(self, replica: Replica, attempt: RequestAttempt) -> None:
        """Aborts a request on a replica; this may take until the end of an iteration."""
        request_id = attempt.arrival.request.request_id
        for notify in self._listeners.aborts:
            notify(request_id)
        replica.abort(request_id)

    def give_up(self, attempt: RequestAttempt) -> None:
        """Ends a request in progress that its client has given up and will not send again."""
        if attempt.replica is not None:
            attempt.is_given_up, attempt.is_timed_out = True, False
            self.abort(attempt.replica, attempt)
            return
        self.stop_holding(attempt)
        self.abandon(attempt)

    def stop_holding(self, attempt: RequestAttempt) -> bool:
        """Stops holding a request for a replica; returns whether it was held."""
        return self._held.pop(attempt.arrival.request.request_id, None) is not None

    def abandon(self, attempt: RequestAttempt) -> None:
        """Ends a request that its client has abandoned and that no replica has."""
        self._record_held_time(attempt, self._clock.now)
        self._requests.abandon(attempt.arrival.request.request_id, self._clock.now)
        self._ended(attempt)

    def stop(self, end_s: float) -> None:
        """Records, at the end of the run, for how long requests without a replica were held."""
        for attempt in self.attempts.values():
            if attempt.replica is None:
                self._record_held_time(attempt, end_s)

    def _ended(self, attempt: RequestAttempt) -> None:
        """Removes a request that is complete or was abandoned, and notifies the listeners."""
        request = attempt.arrival.request
        del self.attempts[request.request_id]
        for notify in self._listeners.left:
            notify(attempt, self._clock.now)
        self._on_end(request)

    def _record_held_time(self, attempt: RequestAttempt, now: float) -> None:
        """Records the time for which no replica has had a request."""
        if now > attempt.held_since_s:
            self._requests.hold(attempt.arrival.request.request_id, now - attempt.held_since_s)
            attempt.held_since_s = now


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


class Router(NamedTuple):
    """A routing policy with its entry point and its optional event handlers."""

    policy: Routing
    choose: Callable[[Request, SequenceOf[ReplicaView], float], int]
    on_first_token: Callable[[Request, float], None] | None
    on_end: Callable[[Request, float], None] | None


class Routers(dict[str | None, Router]):
    """Copies of one policy by model; requests that name no model share the policy itself.

    length_predictions: passes predicted output lengths to a policy that needs them.
    """

    def __init__(self, routing: Routing, length_predictions: LengthPredictions | None) -> None:
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


class LengthPredictions(GatewayAttachment):
    """Predicted output lengths of requests, from a predictor that learns from complete requests.

    attempts: the attempts in progress, by request id.
    """

    def __init__(
        self, predictor: LengthPredictor, attempts: Mapping[int, RequestAttempt], requests: RequestLog
    ) -> None:
        self._predictor = predictor
        self._attempts = attempts
        self._requests = requests

    def predict_for(self, routing: Routing, request: Request) -> None:
        """Passes the predicted output length of a request to a routing policy."""
        predictor = self._predictor
        attempt = self._attempts[request.request_id]
        truth = attempt.arrival.num_output_tokens if predictor.needs_truth else None
        routing.on_predicted(request, predictor.predict(request, truth))  # type: ignore[attr-defined]

    def choose(
        self, routing: Routing, request: Request, replicas: SequenceOf[ReplicaView], now: float
    ) -> int:
        """Returns the choice of a routing policy, after passing it the predicted output length."""
        self.predict_for(routing, request)
        return routing.choose(request, replicas, now)

    def left(self, attempt: RequestAttempt, now: float) -> None:
        request = attempt.arrival.request
        if self._requests.status[request.request_id] == FINISHED:
            self._predictor.observe(request, self._requests.output_tokens[request.request_id])
