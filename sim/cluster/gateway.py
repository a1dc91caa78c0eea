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
from sim.cluster.routers import Routers
from sim.cluster.visit import Visit
from sim.engine.clock import Clock
from sim.engine.replica import Replica
from sim.records.requests import RequestLog
from sim.workload.base import Arrival

UNSERVABLE = "can never be served"
"""What failures of requests are counted as whose own reasons are full of numbers."""


class Gateway:
    """The gateway of a run. on_end is called with every request that has ended. visits: by request id."""

    def __init__(
        self,
        routers: Routers,
        *,
        clock: Clock,
        requests: RequestLog,
        visits: dict[int, Visit],
        on_end: Callable[[Request], None],
    ) -> None:
        self.fleet: Fleet  # set by `GatewayAssembly.join`: its replicas report to this gateway
        self.visits = visits
        self._routers = routers
        self._held: dict[int, Visit] = {}  # of these, those that wait for a replica
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
        visit = self.visits[request_id] = Visit(arrival, self._clock.now)
        self.ask(visit)
        for tell in self._tell.arrived:
            tell(visit)

    def ask(self, visit: Visit) -> None:
        """A client sends its request, perhaps again."""
        for tell in self._tell.asks:
            tell(visit)
        self.go_on(visit)

    def go_on(self, visit: Visit) -> None:
        """Let a request in, if it is not yet, and send it to the replica that the router chooses."""
        now, request, tell = self._clock.now, visit.arrival.request, self._tell
        candidates = self.fleet.serving_model[request.model]
        if not candidates:
            self._wait_for_replica(visit)
            return
        for candidates_of in tell.candidates:
            left = candidates_of(visit, candidates, now)
            if left is None:
                return
            candidates = left
        policy, choose, _, visit.on_routed_end = self._routers[request.model]
        visit.replica = replica = chosen(policy, choose(request, candidates, now), candidates)
        self._requests.send(request.request_id, replica.index)
        if now > visit.came_s:
            self._note_held(visit, now)
            request = request._replace(arrival_s=now)  # when the engine sees it for the first time
        try:
            for sends in tell.sends:
                if sends(visit, replica, request):
                    return
            replica.submit(request, visit.stop_after)
        except RejectedError as error:
            self.take_back(visit)
            self.fail(visit, str(error), inf)

    def _wait_for_replica(self, visit: Visit) -> None:
        """No replica serves a request: hold it until one does, if one is on its way."""
        request = visit.arrival.request
        if self.fleet.calls_for(request.model):
            self._held[request.request_id] = visit
        else:
            self.fail(visit, "no replica takes requests")

    def fleet_changed(self) -> None:
        """A replica takes requests from now on, or one that was on its way will not come."""
        for tell in self._tell.fleet_changed:
            tell()
        held, self._held = self._held, {}
        for visit in held.values():
            self.go_on(visit)

    # ... and go.

    def end(self, seq: Sequence) -> None:
        """A replica is done with a request."""
        visit = self.visits[seq.request_id]
        replica = visit.replica
        assert replica is not None
        self.take_back(visit)
        for is_no_answer in self._tell.ends:
            if is_no_answer(visit, replica, seq):
                return
        self._ended(visit)

    def take_back(self, visit: Visit) -> None:
        """A replica has a request no more."""
        visit.replica, visit.held_since_s = None, self._clock.now
        if visit.on_routed_end is not None:
            self.tell_router(visit)

    def tell_router(self, visit: Visit) -> None:
        """The replica that it chose is done with a request."""
        if visit.on_routed_end is not None:
            visit.on_routed_end(visit.arrival.request, self._clock.now)
            visit.on_routed_end = None

    def fail(self, visit: Visit, reason: str, retry_after_s: float | None = None) -> None:
        """An attempt has failed: its client sends the request again, or it is over.

        retry_after_s: as in `policies.admission.Refusal`.
        """
        request, now = visit.arrival.request, self._clock.now
        for tell in self._tell.failing:
            tell(visit)
        for tell_left in self._tell.left:
            tell_left(visit, now)
        self._note_held(visit, now)
        self._requests.fail(UNSERVABLE if retry_after_s == inf else reason)
        for comes_again in self._tell.comes_again:
            if comes_again(visit, retry_after_s):
                return
        del self.visits[request.request_id]
        self._requests.reject(request.request_id, reason, now)
        self._on_end(request)

    def abort(self, replica: Replica, visit: Visit) -> None:
        """Tell a replica to drop a request; it may take an iteration until it has."""
        request_id = visit.arrival.request.request_id
        for tell in self._tell.aborts:
            tell(request_id)
        replica.abort(request_id)

    def forget_held(self, visit: Visit) -> bool:
        """Let a request wait for a replica no more; whether it did."""
        return self._held.pop(visit.arrival.request.request_id, None) is not None

    def abandon(self, visit: Visit) -> None:
        """A request is given up that no replica has."""
        self._note_held(visit, self._clock.now)
        self._requests.abandon(visit.arrival.request.request_id, self._clock.now)
        self._ended(visit)

    def stop(self, end_s: float) -> None:
        """The run is over: note for how long those were held that no replica has."""
        for visit in self.visits.values():
            if visit.replica is None:
                self._note_held(visit, end_s)

    def _ended(self, visit: Visit) -> None:
        """A request is answered, or was given up."""
        request = visit.arrival.request
        del self.visits[request.request_id]
        for tell in self._tell.left:
            tell(visit, self._clock.now)
        self._on_end(request)

    def _note_held(self, visit: Visit, now: float) -> None:
        """No replica has had a request until now."""
        if now > visit.held_since_s:
            self._requests.hold(visit.arrival.request.request_id, now - visit.held_since_s)
            visit.held_since_s = now
