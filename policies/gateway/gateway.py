"""The gateway between clients and replicas: admits or refuses requests and sends them to replicas.

    client --arrive--> admission --admit--> routing --> replica --answer--> client
              ^            |                   ^           |
              |         refused                +--- resend | its replica crashed
              +-- retry, after a delay ------- timed out --+

A request that no replica can serve now is held if one is starting, and dispatched when that one serves; else
it is refused. A client gets one response, however many replicas have worked on it, and the times of a request
count from its first arrival.

This module has the path of a request to a replica and back, and to another one after a crash. All other parts
of the diagram are attached by `attach`. A run attaches the parts that it needs: clients that time out, an
admission policy, prefill pools. A gateway without attachments only routes every request to a replica.

It waits for nothing and knows no clock but the one it is given, so that the simulator and the fleet of real
engines drive the same object: they call `arrive`, `first_token`, `end`, `lost` and `fleet_changed`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Generic

from policies.core.limits import RejectedError
from policies.core.request import Request
from policies.gateway.attachments import (
    A,
    GatewayAttachment,
    GatewayListeners,
    GatewayLog,
    Now,
    R,
    RequestAttempt,
    S,
    Serving,
)
from policies.gateway.routers import Routers
from policies.routing import chosen

UNSERVABLE = "can never be served"
"""The reason under which requests that no replica can ever serve are counted; their full reasons differ."""
CRASHED = "its replica crashed"
"""The reason of an attempt that was sent again as often as allowed."""


class Gateway(Generic[R, A, S]):
    """The gateway of a run. on_end is called with every request that has ended.

    attempts: the attempts in progress, by request id. max_resends: number of times that an attempt is sent
    again after crashes of its replica. keeps_tokens: whether it then continues after the tokens that its
    client has, rather than from scratch.
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
        self.fleet: Serving[R]  # set by its owner, as the replicas report to this gateway
        self.attempts = attempts
        self._routers = routers
        self._held: dict[int, RequestAttempt[R, A]] = {}  # those of `attempts` that wait for a replica
        self._clock = clock
        self._requests = requests
        self._on_end = on_end
        self._max_resends = max_resends
        self._keeps_tokens = keeps_tokens
        self._listeners: GatewayListeners[R, A, S] = GatewayListeners()

    def attach(self, attachment: GatewayAttachment[R, A, S]) -> None:
        """Attaches a listener to the events of the gateway; it is called after those attached before."""
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

    def _wait_for_replica(self, attempt: RequestAttempt[R, A]) -> None:
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
        attempt that was resent as often as allowed fails.
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
        """Ends a request in progress that its client has given up and will not send again."""
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
        """Records, at the end of the run, for how long requests without a replica were held."""
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
        """Records the time for which no replica has had a request."""
        if now > attempt.held_since_s:
            self._requests.hold(attempt.arrival.request.request_id, now - attempt.held_since_s)
            attempt.held_since_s = now
