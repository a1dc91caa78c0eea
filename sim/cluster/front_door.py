"""What stands between clients and replicas: who is let in, who is refused, and what becomes of both.

    client --arrive--> admission --let in--> routing --> replica --answer--> client
              ^            |                    ^           |
              |         refused                 +--- resend | its replica crashed
              +-- retry, later ----------------- timed out --+

A request that finds no replica is held if one is on its way, and asks to be let in when it is there; else it
is refused. Clients see one answer, however many replicas began it, and its record counts from when the
request came first.

Above 400 lines, as what a request meets between its client and a replica, and back, is one protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

from policies.core.limits import RejectedError, StopAfter
from policies.core.plan import Migrant
from policies.core.request import Request
from policies.core.sequence import Sequence as TokenSequence
from policies.routing import Routing, chosen
from sim.cluster.first_tokens import FirstTokens
from sim.cluster.fleet import Fleet
from sim.cluster.routers import Hooks, Routers
from sim.cluster.settings import ClusterSettings
from sim.cluster.visit import Visit
from sim.engine.clock import Clock, Phase
from sim.engine.replica import Replica
from sim.records.requests import RequestLog, Status
from sim.transfer.handovers import Handovers
from sim.transfer.mirrors import Mirrors
from sim.workload.base import Arrival

UNSERVABLE = "can never be served"
"""What failures of requests are counted as whose own reasons are full of numbers."""


class FrontDoor:
    """The gateway of a run. on_end is called with every request that has ended. patience_s: see `Source`.

    counts_met: whether somebody asks how many answers met the SLO.
    """

    def __init__(
        self,
        settings: ClusterSettings,
        *,
        clock: Clock,
        requests: RequestLog,
        on_end: Callable[[Request], None],
        patience_s: float | None,
        counts_met: bool,
    ) -> None:
        self.fleet: Fleet  # set by whoever makes both: its replicas report to this door
        self.handovers: Handovers | None = None  # the same, if there are prefill pools
        self.mirrors: Mirrors | None = None  # the same, if KV is mirrored
        self._settings = settings
        self._clock = clock
        self._requests = requests
        self._admission = settings.admission
        self._routers = Routers(settings.routing)
        self._retries = settings.retries
        self._tell_admission = Hooks.of(settings.admission)
        self._on_end = on_end
        self._patience_s = patience_s
        self._slo = settings.slo if counts_met else None
        self._predictor = settings.prediction
        self._first_tokens: dict[int, FirstTokens] = {}  # by replica, where they are wanted
        self._visits: dict[int, Visit] = {}
        self._held: dict[int, Visit] = {}  # of these, who waits for a replica

    @property
    def _waits_for_token(self) -> bool:
        """Whether a client that has a token waits for the rest, however long."""
        return self._retries.timeout_s is not None and self._retries.timeout_until == "first_token"

    def attach(self, replica: Replica) -> None:
        """Let a replica tell of first tokens, if they are wanted."""
        if (
            self._waits_for_token
            or self._tell_admission.first_token is not None
            or self._routers.see_first_tokens
        ):
            first_tokens = self._first_tokens[replica.index] = FirstTokens(self.first_token)
            replica.attach(first_tokens)

    def arrive(self, arrival: Arrival) -> None:
        """A request comes for the first time: open its record, and ask for it to be let in."""
        request_id = arrival.request.request_id
        self._requests.arrive(arrival.request)
        visit = self._visits[request_id] = Visit(arrival, self._clock.now)
        self._retries.first_sent()
        if self._ask(visit) and self._patience_s is not None:
            give_up_s = self._clock.now + self._patience_s
            self._clock.at(give_up_s, Phase.arrive, partial(self._give_up, visit))

    def first_token(self, request_id: int) -> None:
        """A request has got its first token, from whichever replica."""
        visit = self._visits[request_id]
        request, now = visit.arrival.request, self._clock.now
        tell_router = self._routers.of_model(request.model).tell
        if tell_router.first_token is not None:
            tell_router.first_token(request, now)
        if self._tell_admission.first_token is not None and not visit.has_token:
            self._tell_admission.first_token(request, now)
        visit.has_token = True

    def stop_after(self, request_id: int) -> StopAfter:
        """The truth about a request: output tokens after which it ends."""
        return self._visits[request_id].stop_after

    def tell_length(self, routing: Routing, request: Request) -> None:
        """Tell a router how long an answer is expected to be."""
        predictor = self._predictor
        assert predictor is not None
        truth = self._visits[request.request_id].arrival.num_output_tokens if predictor.needs_truth else None
        routing.on_predicted(request, predictor.predict(request, truth))  # type: ignore[attr-defined]

    def moved(self, request: Request, replica: Replica) -> None:
        """A request goes on in another replica."""
        self._visits[request.request_id].replica = replica
        self.fleet.sent(replica, request.prompt.num_tokens)

    def stays(self, request_id: int, replica: Replica) -> None:
        """A request is back where it was: nobody else has it."""
        self._visits[request_id].replica = replica

    def num_sends(self, request_id: int) -> int:
        """How often the router has chosen a replica for a request."""
        return self._visits[request_id].num_sends

    def departed(self, replica: Replica, request: Request, num_sends: int) -> None:
        """A replica has freed what it held of a request that goes on, or has ended, elsewhere.

        num_sends: as it was when the request was handed over from there.
        """
        visit = self._visits.get(request.request_id)
        if visit is not None and visit.num_sends == num_sends:  # else the router was told when that was over
            self._tell_router(visit)
        self.fleet.ended(replica, True, self._clock.now)

    def refuse(self, request: Request, reason: str) -> None:
        """An attempt has failed because the decode replica cannot go on with it."""
        visit = self._visits[request.request_id]
        self._take_back(visit)
        self._fail(visit, reason, inf)

    def end(self, seq: TokenSequence) -> None:
        """A replica is done with a request."""
        visit = self._visits[seq.request_id]
        replica = visit.replica
        assert replica is not None
        self._take_back(visit)
        is_good = self._slo is None or self._slo.is_met(self._requests, seq.request_id)
        self.fleet.ended(replica, is_good and not visit.is_timed_out, self._clock.now)
        if visit.is_timed_out:
            replica.recorder.events.timed_out(seq, self._clock.now)
            self._requests.lose(seq.request_id, in_crash=False)
            self._requests.forget_handover(seq.request_id)
            self._fail(visit, "timed out")
        else:
            self._ended(visit)

    def fleet_changed(self) -> None:
        """A replica takes requests from now on, or one that was on its way will not come."""
        if self.handovers is not None:
            self.handovers.ready()
        held, self._held = self._held, {}
        for visit in held.values():
            self._go_on(visit)

    def lost(self, request_id: int) -> None:
        """A crash has lost a request: the service sends it again, or its client has to."""
        visit = self._visits[request_id]
        if visit.has_left or self.handovers is None or not self.handovers.lost(visit.arrival.request):
            self.begin_again(request_id)

    def begin_again(self, request_id: int, *, is_resend: bool = True) -> None:
        """No replica has a request any more: it goes on behind the tokens that went out, or from scratch.

        is_resend: a crash of its replica is why, not one of a mirror that it was to have KV from.
        """
        visit = self._visits[request_id]
        self._take_back(visit)
        self._requests.forget_handover(request_id)
        is_sent = not visit.has_left and (not is_resend or visit.num_resends < self._settings.max_resends)
        several = visit.arrival.request.branching is not None
        visit.goes_on = is_sent and self._settings.recovery.keeps_tokens and not several
        if not visit.goes_on:
            self._requests.lose(request_id, in_crash=True)
        if visit.is_given_up:
            self._abandon(visit)
        elif visit.is_timed_out:
            self._fail(visit, "timed out")
        elif is_sent:
            visit.num_resends += is_resend
            self._requests.num_resends += is_resend
            self._go_on(visit)
        else:
            self._fail(visit, "its replica crashed")

    def stop(self, end_s: float) -> None:
        """The run is over: note for how long those were held that no replica has."""
        for visit in self._visits.values():
            if visit.replica is None:
                self._note_held(visit, end_s)

    def _ask(self, visit: Visit) -> bool:
        """A client sends its request, perhaps again; whether it is still under way then."""
        visit.begin_attempt()
        self._requests.tries[visit.arrival.request.request_id] += 1
        if self._retries.timeout_s is not None:
            time_out = partial(self._time_out, visit, visit.attempt)
            self._clock.at(self._clock.now + self._retries.timeout_s, Phase.arrive, time_out)
        return self._go_on(visit)

    def _go_on(self, visit: Visit) -> bool:
        """Let a request in, if it is not yet, and send it on; whether it is still under way then."""
        request, now = visit.arrival.request, self._clock.now
        serving = self.fleet.of_model(request.model)
        if not serving:
            if self.fleet.calls_for(request.model):
                self._held[request.request_id] = visit
                return True
            return self._fail(visit, "no replica takes requests")
        if not visit.is_let_in:
            refusal = self._admission.refusal(request, serving, now)
            if refusal is not None:
                return self._fail(visit, refusal.reason, refusal.retry_after_s)
            visit.is_let_in = True
        return self._send(visit)

    def _send(self, visit: Visit) -> bool:
        """Choose a replica for a request that was let in; whether it is still under way then."""
        now, arrival = self._clock.now, visit.arrival
        request = arrival.request
        router, candidates = self._routers.of_model(request.model), self._candidates(request)
        routing = router.policy
        if router.needs_length:
            self.tell_length(routing, request)
        place = routing.choose(request, candidates, now)
        replica = chosen(routing, place, candidates)
        if now > visit.held_since_s:
            self._note_held(visit, now)
        self._requests.send(request.request_id, replica.index)
        self.fleet.sent(replica, request.prompt.num_tokens)
        visit.replica, visit.is_routed = replica, True
        visit.num_sends += 1
        if now > arrival.at_s:
            request = request._replace(arrival_s=now)  # when the engine sees it for the first time
        migrant = self._migrant(visit, replica, request) if visit.goes_on else None
        if migrant is not None:
            self._resume(visit, replica, migrant)
            return True
        try:
            self._check_prefill(replica, request, request.prompt.num_tokens)
            replica.submit(request, visit.stop_after)
        except RejectedError as error:
            self._take_back(visit)
            return self._fail(visit, str(error), inf)
        return True

    def _resume(self, visit: Visit, replica: Replica, migrant: Migrant) -> None:
        """Let a request go on in a replica, which has found that it can."""
        request_id = migrant.request.request_id
        replica.resume(migrant, visit.stop_after)
        self._requests.num_resumed += 1
        if replica.index in self._first_tokens:
            self._first_tokens[replica.index].resumes(request_id)
        if migrant.num_computed:
            assert self.mirrors is not None
            self.mirrors.expect(request_id, replica)

    def _migrant(self, visit: Visit, replica: Replica, request: Request) -> Migrant | None:
        """With what a request goes on in a replica; None: it begins there, for want of anything, or of room.

        At least two tokens are left to compute, so that it gets its next one as prompts do.
        """
        request_id, arrival = request.request_id, visit.arrival
        num_known = request.prompt.num_tokens + self._requests.output_tokens[request_id]
        num_left = 0 if self.mirrors is None else self.mirrors.num_left(request_id)
        num_computed = max(0, min(num_left, num_known - 2))
        if num_known == request.prompt.num_tokens and not num_computed:
            return None
        try:
            replica.core.check_migrant(request, num_known, arrival.num_output_tokens)
            self._check_prefill(replica, request, num_known)
        except RejectedError:
            self._begin_from_scratch(visit)
            return None
        return Migrant(request, num_known, num_computed)

    def _check_prefill(self, replica: Replica, request: Request, num_known: int) -> None:
        """Raise RejectedError for what a prefill replica computes and nobody could decode."""
        if replica.pool.role == "prefill":
            assert self.handovers is not None
            self.handovers.check(request, num_known)

    def _begin_from_scratch(self, visit: Visit) -> None:
        """Nothing is kept of a request that was to go on."""
        request_id = visit.arrival.request.request_id
        visit.goes_on = False
        self._requests.lose(request_id, in_crash=True)
        if self.mirrors is not None:
            self.mirrors.ended(request_id)

    def _candidates(self, request: Request) -> list[Replica]:
        """Whom the router may choose from."""
        if self.handovers is None:
            return self.fleet.of_model(request.model)
        return self.fleet.for_prompt(self.handovers.overflow_tokens)

    def _take_back(self, visit: Visit) -> None:
        """A replica has a request no more."""
        visit.replica, visit.held_since_s = None, self._clock.now
        self._tell_router(visit)

    def _tell_router(self, visit: Visit) -> None:
        """The replica that it chose is done with a request."""
        request = visit.arrival.request
        tell = self._routers.of_model(request.model).tell.end
        if visit.is_routed and tell is not None:
            tell(request, self._clock.now)
        visit.is_routed = False

    def _leave(self, visit: Visit) -> None:
        """An attempt is over."""
        request, now = visit.arrival.request, self._clock.now
        if visit.is_let_in and self._tell_admission.end is not None:
            self._tell_admission.end(request, now)
        visit.is_let_in = False
        if self.handovers is not None:
            self.handovers.ended(request, now)
        if self.mirrors is not None:
            self.mirrors.ended(request.request_id)
        self._requests.lost_kv.pop(request.request_id, None)

    def _fail(self, visit: Visit, reason: str, retry_after_s: float | None = None) -> bool:
        """An attempt has failed: its client sends the request again, or it is over; whether it is not."""
        request_id, now = visit.arrival.request.request_id, self._clock.now
        if visit.goes_on:
            self._begin_from_scratch(visit)
        self._leave(visit)
        self._note_held(visit, now)
        self._requests.fail(UNSERVABLE if retry_after_s == inf else reason)
        again_s = self._retries.next_at(request_id, visit.attempt, now, retry_after_s)
        if again_s is not None:
            self._clock.at(again_s, Phase.arrive, partial(self._ask_again, visit, visit.attempt))
            return True
        del self._visits[request_id]
        self._requests.reject(request_id, reason, now)
        self._on_end(visit.arrival.request)
        return False

    def _ask_again(self, visit: Visit, attempt: int, event: int) -> None:
        if self._is_at(visit, attempt):
            self._ask(visit)

    def _time_out(self, visit: Visit, attempt: int, event: int) -> None:
        """A client has waited long enough for the answer to an attempt, or for its first token."""
        request_id = visit.arrival.request.request_id
        if not self._is_at(visit, attempt) or visit.is_given_up:
            return
        if self._waits_for_token and visit.has_token:
            return
        if visit.replica is not None:
            visit.is_timed_out = True
            self._abort(visit.replica, request_id)
        elif self._held.pop(request_id, None) is not None:
            self._fail(visit, "timed out")

    def _abort(self, replica: Replica, request_id: int) -> None:
        """Tell a replica to drop a request; it may take an iteration until it has."""
        if self.handovers is not None:
            self.handovers.withdraw(request_id)
        replica.abort(request_id)

    def _is_at(self, visit: Visit, attempt: int) -> bool:
        """Whether a request is under way in that attempt of its client's."""
        known = self._visits.get(visit.arrival.request.request_id)
        return known is visit and visit.attempt == attempt

    def _give_up(self, visit: Visit, event: int) -> None:
        """A client's patience is at its end."""
        request_id = visit.arrival.request.request_id
        if self._visits.get(request_id) is not visit:
            return
        if visit.replica is not None:
            visit.is_given_up, visit.is_timed_out = True, False
            self._abort(visit.replica, request_id)
            return
        self._held.pop(request_id, None)
        self._abandon(visit)

    def _abandon(self, visit: Visit) -> None:
        """A request is given up that no replica has."""
        self._note_held(visit, self._clock.now)
        self._requests.abandon(visit.arrival.request.request_id, self._clock.now)
        self._ended(visit)

    def _ended(self, visit: Visit) -> None:
        """A request is answered, or was given up."""
        request = visit.arrival.request
        request_id = request.request_id
        del self._visits[request_id]
        if self._predictor is not None and self._requests.status[request_id] == Status.finished:
            self._predictor.observe(request, self._requests.output_tokens[request_id])
        self._leave(visit)
        self._on_end(request)

    def _note_held(self, visit: Visit, now: float) -> None:
        """No replica has had a request until now."""
        if now > visit.held_since_s:
            self._requests.hold(visit.arrival.request.request_id, now - visit.held_since_s)
            visit.held_since_s = now
