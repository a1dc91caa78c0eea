"""The gateway between clients and replicas: admits or refuses requests and sends them to replicas.

    client --arrive--> admission --admit--> routing --> replica --answer--> client
              ^            |                   ^           |
              |         refused                +--- resend | its replica crashed
              +-- retry, later --------------- timed out --+

A request that finds no replica is held if one is starting, and dispatched when it is there; else it is
refused. A client sees one answer, however many replicas began it, and the request's record counts from the
first arrival.

This module has the path of a request to a replica and back. All other parts of the picture join by `attach`:
see `sim.cluster.gateway_attachment`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

from policies.core.limits import RejectedError
from policies.core.request import Request
from policies.core.sequence import Sequence
from policies.routing import chosen
from sim.cluster.fleet import Fleet
from sim.cluster.gateway_attachment import GatewayAttachment, GatewayListeners
from sim.cluster.request_attempt import RequestAttempt
from sim.cluster.routers import Routers
from sim.engine.clock import Clock
from sim.engine.replica import Replica
from sim.records.requests import RequestLog
from sim.workload.base import Arrival

UNSERVABLE = "can never be served"
"""The reason by which requests are counted that no replica can serve; their full reasons differ."""


class Gateway:
    """The gateway of a run. on_end is called with every request that has ended.

    attempts: those under way, by request id.
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
        self.fleet: Fleet  # set by `GatewayAssembly.join`: its replicas report to this gateway
        self.attempts = attempts
        self._routers = routers
        self._held: dict[int, RequestAttempt] = {}  # of these, those that wait for a replica
        self._clock = clock
        self._requests = requests
        self._on_end = on_end
        self._listeners = GatewayListeners()

    def attach(self, attachment: GatewayAttachment) -> None:
        """Attach a listener to the events of the gateway; it is called after those attached before."""
        self._listeners.add(attachment)

    # Requests arrive ...

    def arrive(self, arrival: Arrival) -> None:
        """A request arrives for the first time: open its record, and submit it to admission and routing."""
        request, requests = arrival.request, self._requests
        request_id = request.request_id
        requests.arrive(request)
        requests.tries[request_id] = 1
        attempt = self.attempts[request_id] = RequestAttempt(arrival, self._clock.now)
        self.ask(attempt)
        for notify in self._listeners.arrived:
            notify(attempt)

    def ask(self, attempt: RequestAttempt) -> None:
        """A client sends its request, for the first time or as a retry."""
        for notify in self._listeners.asks:
            notify(attempt)
        self.dispatch(attempt)

    def dispatch(self, attempt: RequestAttempt) -> None:
        """Admit a request, unless that is done, and send it to the replica that the router chooses."""
        now, request, listeners = self._clock.now, attempt.arrival.request, self._listeners
        candidates = self.fleet.serving_model[request.model]
        if not candidates:
            self._wait_for_replica(attempt)
            return
        for candidates_of in listeners.candidates:
            left = candidates_of(attempt, candidates, now)
            if left is None:
                return
            candidates = left
        policy, choose, _, attempt.on_routed_end = self._routers[request.model]
        attempt.replica = replica = chosen(policy, choose(request, candidates, now), candidates)
        self._requests.send(request.request_id, replica.index)
        if now > attempt.first_arrival_s:
            self._note_held(attempt, now)
            request = request._replace(arrival_s=now)  # when the engine sees it for the first time
        try:
            for sends in listeners.sends:
                if sends(attempt, replica, request):
                    return
            replica.submit(request, attempt.stop_after)
        except RejectedError as error:
            self.release(attempt)
            self.fail(attempt, str(error), inf)

    def _wait_for_replica(self, attempt: RequestAttempt) -> None:
        """Hold a request that no replica can serve now until one can, if one is starting; else it fails."""
        request = attempt.arrival.request
        if self.fleet.calls_for(request.model):
            self._held[request.request_id] = attempt
        else:
            self.fail(attempt, "no replica takes requests")

    def fleet_changed(self) -> None:
        """A replica takes requests from now on, or one that was starting will not come."""
        for notify in self._listeners.fleet_changed:
            notify()
        held, self._held = self._held, {}
        for attempt in held.values():
            self.dispatch(attempt)

    # ... and end.

    def end(self, seq: Sequence) -> None:
        """A replica has finished or dropped a request."""
        attempt = self.attempts[seq.request_id]
        replica = attempt.replica
        assert replica is not None
        self.release(attempt)
        for is_no_answer in self._listeners.ends:
            if is_no_answer(attempt, replica, seq):
                return
        self._ended(attempt)

    def release(self, attempt: RequestAttempt) -> None:
        """Note that the replica of a request does not have it any more."""
        attempt.replica, attempt.held_since_s = None, self._clock.now
        if attempt.on_routed_end is not None:
            self.notify_router(attempt)

    def notify_router(self, attempt: RequestAttempt) -> None:
        """Tell the router that a request has ended on the replica that it chose."""
        if attempt.on_routed_end is not None:
            attempt.on_routed_end(attempt.arrival.request, self._clock.now)
            attempt.on_routed_end = None

    def fail(self, attempt: RequestAttempt, reason: str, retry_after_s: float | None = None) -> None:
        """Fail an attempt: its client retries, or the request is rejected.

        retry_after_s: as in `policies.admission.Refusal`.
        """
        request, now = attempt.arrival.request, self._clock.now
        for notify in self._listeners.failing:
            notify(attempt)
        for notify_left in self._listeners.left:
            notify_left(attempt, now)
        self._note_held(attempt, now)
        self._requests.fail(UNSERVABLE if retry_after_s == inf else reason)
        for will_retry in self._listeners.will_retry:
            if will_retry(attempt, retry_after_s):
                return
        del self.attempts[request.request_id]
        self._requests.reject(request.request_id, reason, now)
        self._on_end(request)

    def abort(self, replica: Replica, attempt: RequestAttempt) -> None:
        """Tell a replica to abort a request; this may take until the end of an iteration."""
        request_id = attempt.arrival.request.request_id
        for notify in self._listeners.aborts:
            notify(request_id)
        replica.abort(request_id)

    def forget_held(self, attempt: RequestAttempt) -> bool:
        """Stop holding a request; returns whether it was held."""
        return self._held.pop(attempt.arrival.request.request_id, None) is not None

    def abandon(self, attempt: RequestAttempt) -> None:
        """A client gives up a request that no replica has."""
        self._note_held(attempt, self._clock.now)
        self._requests.abandon(attempt.arrival.request.request_id, self._clock.now)
        self._ended(attempt)

    def stop(self, end_s: float) -> None:
        """The run is over: record the time for which requests without a replica were held."""
        for attempt in self.attempts.values():
            if attempt.replica is None:
                self._note_held(attempt, end_s)

    def _ended(self, attempt: RequestAttempt) -> None:
        """A request is finished, or was given up."""
        request = attempt.arrival.request
        del self.attempts[request.request_id]
        for notify in self._listeners.left:
            notify(attempt, self._clock.now)
        self._on_end(request)

    def _note_held(self, attempt: RequestAttempt, now: float) -> None:
        """Record the time since which no replica has had a request."""
        if now > attempt.held_since_s:
            self._requests.hold(attempt.arrival.request.request_id, now - attempt.held_since_s)
            attempt.held_since_s = now
