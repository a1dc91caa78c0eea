"""What stands between clients and replicas: who is let in, who is refused, and what becomes of both.

    client --arrive--> admission --let in--> routing --> replica --answer--> client
              ^            |                    ^           |
              |         refused                 +--- resend | its replica crashed
              +-- retry, later ----------------- timed out --+

A request that is let in and finds no replica is held if one is on its way, else refused. Clients see one
answer, however many replicas began it, and its record counts from when the request came first.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf, isnan
from typing import NamedTuple

from simpy import Event

from policies.admission import Admission
from policies.limits import RejectedError
from policies.request import Request
from policies.routing import Routing
from policies.sequence import Sequence as TokenSequence
from sim.clock import Clock, Phase
from sim.fleet import Fleet
from sim.metrics.slo import Slo
from sim.records import RequestLog, Status
from sim.replica import Replica
from sim.workload.base import Arrival
from sim.workload.retries import Retries


class Visit:
    """A request under way: where it is, and how often its client has sent it."""

    __slots__ = (
        "arrival",
        "attempt",
        "has_token",
        "held_since_s",
        "is_let_in",
        "is_timed_out",
        "num_resends",
        "replica",
    )

    def __init__(self, arrival: Arrival, now: float) -> None:
        self.arrival = arrival
        self.attempt = 0
        self.replica: Replica | None = None
        self.held_since_s = now  # while no replica has it
        self.num_resends = 0
        self.is_let_in = False
        self.has_token = False  # this attempt, from whichever replica
        self.is_timed_out = False  # its replica was told to drop it; it may be sent again


class FrontDoor:
    """on_end is called with every request that has ended. patience_s: see `Source`.

    max_resends: how often the service itself sends a request again whose replica has crashed. slo: for
    autoscalers, which see how many answers met it.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        requests: RequestLog,
        admission: Admission,
        routing: Routing,
        retries: Retries,
        on_end: Callable[[Request], None],
        patience_s: float | None = None,
        max_resends: int = 0,
        slo: Slo | None = None,
    ) -> None:
        self.fleet: Fleet  # set by whoever makes both: its replicas report to this door
        self._clock = clock
        self._requests = requests
        self._admission = admission
        self._routing = routing
        self._retries = retries
        self._tell_admission = _hooks(admission)
        self._tell_routing = _hooks(routing)
        self._on_end = on_end
        self._patience_s = patience_s
        self._max_resends = max_resends
        self._slo = slo
        self._visits: dict[int, Visit] = {}
        self._held: dict[int, Visit] = {}  # of these, who waits for a replica

    @property
    def sees_first_tokens(self) -> bool:
        """Whether anybody wants to know of them."""
        return any(tell.first_token is not None for tell in (self._tell_admission, self._tell_routing))

    def arrive(self, arrival: Arrival) -> None:
        """A request comes for the first time: open its record, and ask for it to be let in."""
        request_id = arrival.request.request_id
        self._requests.arrive(arrival.request)
        visit = self._visits[request_id] = Visit(arrival, self._clock.now)
        self._retries.first_sent()
        if self._ask(visit) and self._patience_s is not None:
            give_up_s = self._clock.now + self._patience_s
            self._clock.at(give_up_s, Phase.arrive, partial(self._give_up, visit))

    def first_token(self, seq: TokenSequence) -> None:
        """A request has got its first token."""
        visit = self._visits[seq.request_id]
        request, now = visit.arrival.request, self._clock.now
        if self._tell_routing.first_token is not None:
            self._tell_routing.first_token(request, now)
        if self._tell_admission.first_token is not None and not visit.has_token:
            self._tell_admission.first_token(request, now)
        visit.has_token = True

    def end(self, seq: TokenSequence) -> None:
        """A replica is done with a request."""
        visit = self._visits[seq.request_id]
        replica, visit.replica = visit.replica, None
        assert replica is not None
        self.fleet.ended(replica, self._is_good(seq.request_id), self._clock.now)
        if visit.is_timed_out:
            self._requests.lose(seq)
            self._leave(visit)
            self._retry(visit, "timed out", None)
        else:
            self._ended(visit)

    def _is_good(self, request_id: int) -> bool:
        """Whether an answer met the SLO; true where there is none, or nobody asks."""
        if self._slo is None:
            return True
        log = self._requests
        if log.status[request_id] != Status.finished:
            return False
        arrival_s = log.arrival_s[request_id]
        return self._slo.holds(
            ttft_s=log.first_token_s[request_id] - arrival_s,
            e2e_s=log.last_token_s[request_id] - arrival_s,
            num_output_tokens=log.longest_tokens[request_id],
        )

    def ready(self, replica: Replica) -> None:
        """A replica takes requests from now on: send what is held."""
        held, self._held = self._held, {}
        for visit in held.values():
            self._send(visit)

    def lost(self, request_id: int) -> None:
        """A crash has lost a request: the service sends it again, or its client has to."""
        visit = self._visits[request_id]
        visit.replica, visit.held_since_s = None, self._clock.now
        if visit.is_timed_out:
            self._leave(visit)
            self._retry(visit, "timed out", None)
        elif visit.num_resends < self._max_resends:
            visit.num_resends += 1
            if self._tell_routing.end is not None:
                self._tell_routing.end(visit.arrival.request, self._clock.now)
            self._send(visit)
        else:
            self._leave(visit)
            self._retry(visit, "its replica crashed", None)

    def stop(self, end_s: float) -> None:
        """The run is over: note for how long those were held that no replica has."""
        for request_id, visit in self._visits.items():
            if visit.replica is None:
                self._requests.hold(request_id, end_s - visit.held_since_s)

    def _ask(self, visit: Visit) -> bool:
        """A client sends its request, perhaps again; whether it is still under way then."""
        visit.attempt += 1
        visit.num_resends = 0
        visit.has_token = visit.is_timed_out = False
        request, now, serving = visit.arrival.request, self._clock.now, self.fleet.serving
        if not serving and not self.fleet.is_growing:
            return self._retry(visit, "no replica takes requests", None)
        refusal = self._admission.refusal(request, serving, now) if serving else None
        if refusal is not None:
            return self._retry(visit, refusal.reason, refusal.retry_after_s)
        visit.is_let_in = True
        if self._retries.timeout_s is not None:
            time_out = partial(self._time_out, visit, visit.attempt)
            self._clock.at(now + self._retries.timeout_s, Phase.arrive, time_out)
        return self._send(visit)

    def _send(self, visit: Visit) -> bool:
        """Choose a replica for a request that was let in; whether it is still under way then."""
        now, serving, request = self._clock.now, self.fleet.serving, visit.arrival.request
        request_id, arrival = request.request_id, visit.arrival
        if not serving:
            if self.fleet.is_growing:
                self._held[request_id] = visit
                return True
            self._leave(visit)
            return self._retry(visit, "no replica takes requests", None)
        replica = self._chosen(self._routing.choose(request, serving, now))
        self._requests.send(request_id, replica.index, now - visit.held_since_s)
        self.fleet.sent(replica, request.prompt.num_tokens)
        visit.replica = replica
        if now > request.arrival_s:
            request = request._replace(arrival_s=now)  # when the engine sees it for the first time
        try:
            replica.submit(request, arrival.sample_tokens or arrival.num_output_tokens)
        except RejectedError as error:
            visit.replica = None
            self._leave(visit)
            return self._retry(visit, str(error), inf)
        return True

    def _chosen(self, place: int) -> Replica:
        """The replica at a place among those that take requests."""
        serving = self.fleet.serving
        if not 0 <= place < len(serving):
            name = type(self._routing).__name__
            raise ValueError(f"{name} chose replica {place}: must be 0 to {len(serving) - 1}, its place")
        return serving[place]

    def _leave(self, visit: Visit) -> None:
        """An attempt that was let in is over."""
        visit.is_let_in = False
        for tell in (self._tell_admission.end, self._tell_routing.end):
            if tell is not None:
                tell(visit.arrival.request, self._clock.now)

    def _retry(self, visit: Visit, reason: str, retry_after_s: float | None) -> bool:
        """An attempt has failed: its client sends the request again, or it is over; whether it is not."""
        request_id, now = visit.arrival.request.request_id, self._clock.now
        again_s = self._retries.next_at(request_id, visit.attempt, now, retry_after_s)
        if again_s is not None:
            visit.held_since_s = now
            self._clock.at(again_s, Phase.arrive, partial(self._ask_again, visit, visit.attempt))
            return True
        del self._visits[request_id]
        self._requests.reject(request_id, reason, now)
        self._on_end(visit.arrival.request)
        return False

    def _ask_again(self, visit: Visit, attempt: int, event: Event) -> None:
        if self._is_at(visit, attempt):
            self._requests.hold(visit.arrival.request.request_id, self._clock.now - visit.held_since_s)
            visit.held_since_s = self._clock.now
            self._ask(visit)

    def _time_out(self, visit: Visit, attempt: int, event: Event) -> None:
        """A client has waited long enough for the answer to an attempt, or for its first token."""
        request_id = visit.arrival.request.request_id
        if not self._is_at(visit, attempt) or visit.is_timed_out:
            return
        until_token = self._retries.timeout_until == "first_token"
        if until_token and not isnan(self._requests.first_token_s[request_id]):
            return
        if visit.replica is not None:
            visit.is_timed_out = True
            visit.replica.abort(request_id)
        elif self._held.pop(request_id, None) is not None:
            self._leave(visit)
            self._retry(visit, "timed out", None)

    def _is_at(self, visit: Visit, attempt: int) -> bool:
        """Whether a request is under way in that attempt of its client's."""
        known = self._visits.get(visit.arrival.request.request_id)
        return known is visit and visit.attempt == attempt

    def _give_up(self, visit: Visit, event: Event) -> None:
        """A client's patience is at its end."""
        request_id, now = visit.arrival.request.request_id, self._clock.now
        if self._visits.get(request_id) is not visit:
            return
        if visit.replica is not None:
            visit.is_timed_out = False
            visit.replica.abort(request_id)
            return
        self._held.pop(request_id, None)
        self._requests.hold(request_id, now - visit.held_since_s)
        self._requests.abandon(request_id, now)
        self._ended(visit)

    def _ended(self, visit: Visit) -> None:
        """A request is answered, or was given up."""
        request = visit.arrival.request
        del self._visits[request.request_id]
        if visit.is_let_in:
            self._leave(visit)
        self._on_end(request)


class _Hooks(NamedTuple):
    """What a policy wants to be told, if anything."""

    first_token: Callable[[Request, float], None] | None
    end: Callable[[Request, float], None] | None


def _hooks(policy: object) -> _Hooks:
    return _Hooks(getattr(policy, "on_first_token", None), getattr(policy, "on_end", None))
