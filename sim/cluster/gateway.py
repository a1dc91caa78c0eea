"""The gateway between clients and replicas: admits or refuses requests and sends them to replicas.

    client --arrive--> admission --admit--> routing --> replica --answer--> client
              ^            |                   ^           |
              |         refused                +--- resend | its replica crashed
              +-- retry, after a delay ------- timed out --+

A request that no replica can serve now is held if one is starting, and dispatched when that one serves; else
it is refused. A client gets one response, however many replicas have worked on it, and the times of a request
count from its first arrival.

This module has the path of a request to a replica and back. All other parts of the diagram are attached by
`attach`: see `sim.cluster.gateway_attachment`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from policies.core.limits import RejectedError
from policies.core.request import Request
from policies.core.sequence import Sequence
from policies.routing import chosen
from sim.cluster.fleet import Fleet
from sim.cluster.gateway_attachment import GatewayAttachment, GatewayListeners, RequestAttempt
from sim.cluster.routers import Routers
from sim.engine.clock import Clock
from sim.engine.replica import Replica
from sim.records.requests import RequestLog
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
