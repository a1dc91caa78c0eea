"""The gateway between clients and replicas: admits or refuses requests and sends them to replicas.

    client --arrive--> admission --let in--> routing --> replica --answer--> client
              ^            |                    ^           |
              |         refused                 +--- resend | its replica crashed
              +-- retry, later ----------------- timed out --+

A request that finds no replica is held if one is on its way, and asks to be let in when it is there; else it
is refused. Clients see one answer, however many replicas began it, and its record counts from when the
request came first.

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
"""What failures of requests are counted as whose own reasons are full of numbers."""


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
        self._tell = GatewayListeners()

    def attach(self, attachment: GatewayAttachment) -> None:
        """Let an attachment know what happens here, behind those that were attached before."""
        self._tell.add(attachment)

    # Requests come ...

    def arrive(self, arrival: Arrival) -> None:
        """A request comes for the first time: open its record, and ask for it to be let in."""
        request, requests = arrival.request, self._requests
        request_id = request.request_id
        requests.arrive(request)
        requests.tries[request_id] = 1
        attempt = self.attempts[request_id] = RequestAttempt(arrival, self._clock.now)
        self.ask(attempt)
        for tell in self._tell.arrived:
            tell(attempt)

    def ask(self, attempt: RequestAttempt) -> None:
        """A client sends its request, perhaps again."""
        for tell in self._tell.asks:
            tell(attempt)
        self.go_on(attempt)

    def go_on(self, attempt: RequestAttempt) -> None:
        """Let a request in, if it is not yet, and send it to the replica that the router chooses."""
        now, request, tell = self._clock.now, attempt.arrival.request, self._tell
        candidates = self.fleet.serving_model[request.model]
        if not candidates:
            self._wait_for_replica(attempt)
            return
        for candidates_of in tell.candidates:
            left = candidates_of(attempt, candidates, now)
            if left is None:
                return
            candidates = left
        policy, choose, _, attempt.on_routed_end = self._routers[request.model]
        attempt.replica = replica = chosen(policy, choose(request, candidates, now), candidates)
        self._requests.send(request.request_id, replica.index)
        if now > attempt.came_s:
            self._note_held(attempt, now)
            request = request._replace(arrival_s=now)  # when the engine sees it for the first time
        try:
            for sends in tell.sends:
                if sends(attempt, replica, request):
                    return
            replica.submit(request, attempt.stop_after)
        except RejectedError as error:
            self.take_back(attempt)
            self.fail(attempt, str(error), inf)

    def _wait_for_replica(self, attempt: RequestAttempt) -> None:
        """No replica serves a request: hold it until one does, if one is on its way."""
        request = attempt.arrival.request
        if self.fleet.calls_for(request.model):
            self._held[request.request_id] = attempt
        else:
            self.fail(attempt, "no replica takes requests")

    def fleet_changed(self) -> None:
        """A replica takes requests from now on, or one that was on its way will not come."""
        for tell in self._tell.fleet_changed:
            tell()
        held, self._held = self._held, {}
        for attempt in held.values():
            self.go_on(attempt)

    # ... and go.

    def end(self, seq: Sequence) -> None:
        """A replica is done with a request."""
        attempt = self.attempts[seq.request_id]
        replica = attempt.replica
        assert replica is not None
        self.take_back(attempt)
        for is_no_answer in self._tell.ends:
            if is_no_answer(attempt, replica, seq):
                return
        self._ended(attempt)

    def take_back(self, attempt: RequestAttempt) -> None:
        """A replica has a request no more."""
        attempt.replica, attempt.held_since_s = None, self._clock.now
        if attempt.on_routed_end is not None:
            self.tell_router(attempt)

    def tell_router(self, attempt: RequestAttempt) -> None:
        """The replica that it chose is done with a request."""
        if attempt.on_routed_end is not None:
            attempt.on_routed_end(attempt.arrival.request, self._clock.now)
            attempt.on_routed_end = None

    def fail(self, attempt: RequestAttempt, reason: str, retry_after_s: float | None = None) -> None:
        """An attempt has failed: its client sends the request again, or it is over.

        retry_after_s: as in `policies.admission.Refusal`.
        """
        request, now = attempt.arrival.request, self._clock.now
        for tell in self._tell.failing:
            tell(attempt)
        for tell_left in self._tell.left:
            tell_left(attempt, now)
        self._note_held(attempt, now)
        self._requests.fail(UNSERVABLE if retry_after_s == inf else reason)
        for comes_again in self._tell.comes_again:
            if comes_again(attempt, retry_after_s):
                return
        del self.attempts[request.request_id]
        self._requests.reject(request.request_id, reason, now)
        self._on_end(request)

    def abort(self, replica: Replica, attempt: RequestAttempt) -> None:
        """Tell a replica to drop a request; it may take an iteration until it has."""
        request_id = attempt.arrival.request.request_id
        for tell in self._tell.aborts:
            tell(request_id)
        replica.abort(request_id)

    def forget_held(self, attempt: RequestAttempt) -> bool:
        """Let a request wait for a replica no more; whether it did."""
        return self._held.pop(attempt.arrival.request.request_id, None) is not None

    def abandon(self, attempt: RequestAttempt) -> None:
        """A request is given up that no replica has."""
        self._note_held(attempt, self._clock.now)
        self._requests.abandon(attempt.arrival.request.request_id, self._clock.now)
        self._ended(attempt)

    def stop(self, end_s: float) -> None:
        """The run is over: note for how long those were held that no replica has."""
        for attempt in self.attempts.values():
            if attempt.replica is None:
                self._note_held(attempt, end_s)

    def _ended(self, attempt: RequestAttempt) -> None:
        """A request is answered, or was given up."""
        request = attempt.arrival.request
        del self.attempts[request.request_id]
        for tell in self._tell.left:
            tell(attempt, self._clock.now)
        self._on_end(request)

    def _note_held(self, attempt: RequestAttempt, now: float) -> None:
        """No replica has had a request until now."""
        if now > attempt.held_since_s:
            self._requests.hold(attempt.arrival.request.request_id, now - attempt.held_since_s)
            attempt.held_since_s = now
