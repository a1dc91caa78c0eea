"""What stands between clients and replicas: it takes requests in, sends them to replicas, and looks after
those whose replica crashed.

A request that finds no replica is held if one is on its way, else refused. One that a crash has lost is sent
again from the beginning, `max_resends` times at most; clients see one answer, however many replicas began it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from simpy import Event

from policies.limits import RejectedError, StopAfter
from policies.prediction import LengthPredictor
from policies.request import Request
from policies.routing import Routing
from policies.sequence import Sequence as TokenSequence
from sim.clock import Clock, Phase
from sim.fleet import Fleet
from sim.handovers import Handovers
from sim.records import RequestLog, Status
from sim.replica import Replica
from sim.workload.base import Arrival


class Visit:
    """A request under way: where it is, and what the world knows of it."""

    __slots__ = ("arrival", "has_departed", "held_since_s", "replica")

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.replica: Replica | None = None
        self.has_departed = False  # from its prefill replica
        self.held_since_s = arrival.at_s


class FrontDoor:
    """on_end is called with every request that has ended. patience_s: see `Source`.

    predictor: for routers that ask how long answers will be.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        requests: RequestLog,
        routing: Routing,
        on_end: Callable[[Request], None],
        patience_s: float | None = None,
        max_resends: int = 0,
        predictor: LengthPredictor | None = None,
    ) -> None:
        self.fleet: Fleet  # set by whoever makes both: its replicas report to this door
        self._clock = clock
        self._requests = requests
        self._routing = routing
        self._on_routed_end: Callable[[Request, float], None] | None = getattr(routing, "on_end", None)
        self._on_routed_token: Callable[[Request, float], None] | None = getattr(
            routing, "on_first_token", None
        )
        self._on_end = on_end
        self._patience_s = patience_s
        self._max_resends = max_resends
        self._predictor = predictor
        self._visits: dict[int, Visit] = {}
        self._held: dict[int, Visit] = {}  # of these, who waits for a replica
        self.handovers: Handovers | None = None  # set by whoever makes both, if there are prefill pools

    @property
    def sees_first_tokens(self) -> bool:
        """Whether anybody wants to know of them."""
        return self._on_routed_token is not None

    def arrive(self, arrival: Arrival) -> None:
        """A request reaches the service: open its record, and send it on."""
        request = arrival.request
        self._requests.arrive(request)
        visit = self._visits[request.request_id] = Visit(arrival)
        if self._send(visit, request) and self._patience_s is not None:
            give_up = partial(self._give_up, request.request_id)
            self._clock.at(self._clock.now + self._patience_s, Phase.arrive, give_up)

    def first_token(self, seq: TokenSequence) -> None:
        """A request has got its first token."""
        assert self._on_routed_token is not None
        self._on_routed_token(seq.request, self._clock.now)

    def tell_length(self, routing: Routing, request: Request) -> None:
        """Tell a router that asks for it how long an answer is expected to be."""
        if not getattr(routing, "needs_predictor", False):
            return
        predictor = self._predictor
        assert predictor is not None
        truth = self._visits[request.request_id].arrival.num_output_tokens if predictor.needs_truth else None
        routing.on_predicted(request, predictor.predict(request, truth))  # type: ignore[attr-defined]

    def first_token_of(self, request: Request) -> None:
        """The same, where it is a prefill replica's."""
        if self._on_routed_token is not None:
            self._on_routed_token(request, self._clock.now)

    def end(self, seq: TokenSequence) -> None:
        """A replica is done with a request."""
        visit = self._visits.pop(seq.request_id)
        assert visit.replica is not None
        self.fleet.ended(visit.replica, self._clock.now)
        self._ended(seq.request, visit)

    def stop_after(self, request_id: int) -> StopAfter:
        """The truth about a request: output tokens after which it ends."""
        arrival = self._visits[request_id].arrival
        return arrival.sample_tokens or arrival.num_output_tokens

    def moved(self, request_id: int, replica: Replica) -> None:
        """A request goes on in another replica."""
        self._visits[request_id].replica = replica

    def departed(self, replica: Replica, request: Request) -> None:
        """A replica has freed what it held of a request that goes on, or has ended, elsewhere."""
        visit = self._visits.get(request.request_id)
        if visit is not None:  # else it has ended meanwhile, and the router was told
            visit.has_departed = True
            if self._on_routed_end is not None:
                self._on_routed_end(request, self._clock.now)
        self.fleet.ended(replica, self._clock.now)

    def refuse(self, request: Request, reason: str) -> None:
        """A request ends because no decode replica can go on with it."""
        visit = self._visits.pop(request.request_id)
        self._requests.reject(request.request_id, reason, self._clock.now)
        self._ended(request, visit)

    def ready(self, replica: Replica) -> None:
        """A replica takes requests from now on: send what is held."""
        if self.handovers is not None and replica.pool.role != "prefill":
            self.handovers.ready()
        held, self._held = self._held, {}
        for visit in held.values():
            self._send_again(visit)

    def stop(self, end_s: float) -> None:
        """The run is over: note for how long the rest was held."""
        for visit in self._held.values():
            self._requests.hold(visit.arrival.request.request_id, end_s - visit.held_since_s)

    def lost(self, request_id: int) -> None:
        """A crash has lost a request: send it again, or give it up."""
        visit = self._visits[request_id]
        request = visit.arrival.request
        if self.handovers is not None and self.handovers.lost(request):
            return
        self.begin_again(request)

    def begin_again(self, request: Request) -> None:
        """Nothing is left of a request: send it again, or give it up."""
        request_id = request.request_id
        visit = self._visits[request_id]
        if self._on_routed_end is not None and not visit.has_departed:
            self._on_routed_end(request, self._clock.now)
        visit.has_departed = False
        visit.replica = None
        visit.held_since_s = self._clock.now
        if self._requests.attempts[request_id] <= self._max_resends:
            self._send_again(visit)
        else:
            self._refuse(visit, "its replica crashed")

    def _send_again(self, visit: Visit) -> None:
        """As a request that comes now; its record keeps when it really came."""
        self._send(visit, visit.arrival.request._replace(arrival_s=self._clock.now))

    def _send(self, visit: Visit, request: Request) -> bool:
        """Choose a replica and send a request there; whether it is still under way."""
        now, serving = self._clock.now, self._candidates()
        if not serving:
            if self.fleet.is_growing:
                self._held[request.request_id] = visit
                return True
            self._refuse(visit, "no replica takes requests")
            return False
        self.tell_length(self._routing, request)
        replica = self._chosen(self._routing.choose(request, serving, now), serving)
        request_id, arrival = request.request_id, visit.arrival
        self._requests.send(request_id, replica.index, now - visit.held_since_s)
        visit.replica = replica
        try:
            if replica.pool.role == "prefill":
                assert self.handovers is not None
                self.handovers.check(request)
            replica.submit(request, arrival.sample_tokens or arrival.num_output_tokens)
        except RejectedError as error:
            del self._visits[request_id]
            self._requests.reject(request_id, str(error), now)
            self._ended(request, visit)
            return False
        return True

    def _candidates(self) -> list[Replica]:
        """Whom the router may choose from."""
        if self.handovers is None:
            return self.fleet.serving
        return self.fleet.for_prompt(self.handovers.overflow_tokens)

    def _chosen(self, place: int, serving: Sequence[Replica]) -> Replica:
        """The replica at a place among those that take requests."""
        if not 0 <= place < len(serving):
            name = type(self._routing).__name__
            raise ValueError(
                f"{name} chose replica {place}: must be 0 to {len(serving) - 1}, one of those given"
            )
        return serving[place]

    def _refuse(self, visit: Visit, reason: str) -> None:
        """A request ends without a replica."""
        request = visit.arrival.request
        self._requests.hold(request.request_id, self._clock.now - visit.held_since_s)
        del self._visits[request.request_id]
        self._requests.reject(request.request_id, reason, self._clock.now)
        self._on_end(request)

    def _ended(self, request: Request, visit: Visit) -> None:
        if self._on_routed_end is not None and not visit.has_departed:  # else it was told then
            self._on_routed_end(request, self._clock.now)
        if self.handovers is not None:
            self.handovers.ended(request, self._clock.now)
        if self._predictor is not None and self._requests.status[request.request_id] == Status.finished:
            self._predictor.observe(request, self._requests.output_tokens[request.request_id])
        self._on_end(request)

    def _give_up(self, request_id: int, event: Event) -> None:
        """A client's patience is at its end."""
        visit = self._visits.get(request_id)
        if visit is None:
            return
        if visit.replica is not None:
            visit.replica.abort(request_id)
            return
        del self._visits[request_id], self._held[request_id]
        self._requests.hold(request_id, self._clock.now - visit.held_since_s)
        self._requests.abandon(request_id, self._clock.now)
        self._on_end(visit.arrival.request)
