"""Clients that do not wait for ever: they give their requests up, or send them again, sooner or later."""

from __future__ import annotations

from functools import partial

from policies.core.sequence import Sequence
from sim.cluster.gateway import Gateway
from sim.cluster.gateway_attachment import GatewayAttachment
from sim.cluster.visit import Visit
from sim.engine.clock import Clock, Phase
from sim.engine.replica import Replica
from sim.records.requests import RequestLog
from sim.workload.retries import Retries


class Clients(GatewayAttachment):
    """The clients of a run. patience_s: see `Source`."""

    def __init__(
        self,
        gateway: Gateway,
        retries: Retries,
        patience_s: float | None,
        *,
        clock: Clock,
        requests: RequestLog,
    ) -> None:
        self._gateway = gateway
        self._retries = retries
        self._patience_s = patience_s
        self._clock = clock
        self._requests = requests

    def asks(self, visit: Visit) -> None:
        if visit.attempt == 1:
            self._retries.first_sent()
        if self._retries.timeout_s is not None:
            time_out = partial(self._time_out, visit, visit.attempt)
            self._clock.at(self._clock.now + self._retries.timeout_s, Phase.arrive, time_out)

    def arrived(self, visit: Visit) -> None:
        if self._patience_s is not None and self._is_under_way(visit):
            give_up_s = self._clock.now + self._patience_s
            self._clock.at(give_up_s, Phase.arrive, partial(self._give_up, visit))

    def ends(self, visit: Visit, replica: Replica, seq: Sequence) -> bool:
        if not visit.is_timed_out:
            return False
        replica.recorder.events.timed_out(seq, self._clock.now)
        self._requests.lose(seq.request_id, in_crash=False)
        self._requests.forget_handover(seq.request_id)
        self._gateway.fail(visit, "timed out")
        return True

    def comes_again(self, visit: Visit, retry_after_s: float | None) -> bool:
        request_id, attempt = visit.arrival.request.request_id, visit.attempt
        again_s = self._retries.next_at(request_id, attempt, self._clock.now, retry_after_s)
        if again_s is None:
            return False
        self._clock.at(again_s, Phase.arrive, partial(self._ask_again, visit, attempt))
        return True

    def _is_under_way(self, visit: Visit) -> bool:
        return self._gateway.visits.get(visit.arrival.request.request_id) is visit

    def _is_at(self, visit: Visit, attempt: int) -> bool:
        """Whether a request is under way in that attempt of its client's."""
        return visit.attempt == attempt and self._is_under_way(visit)

    def _ask_again(self, visit: Visit, attempt: int, event: int) -> None:
        if self._is_at(visit, attempt):
            visit.come_again()
            self._requests.tries[visit.arrival.request.request_id] += 1
            self._gateway.ask(visit)

    def _time_out(self, visit: Visit, attempt: int, event: int) -> None:
        """A client has waited long enough for the answer to an attempt, or for its first token."""
        if not self._is_at(visit, attempt) or visit.is_given_up:
            return
        if self._retries.waits_for_token and visit.has_token:
            return
        if visit.replica is not None:
            visit.is_timed_out = True
            self._gateway.abort(visit.replica, visit)
        elif self._gateway.forget_held(visit):
            self._gateway.fail(visit, "timed out")

    def _give_up(self, visit: Visit, event: int) -> None:
        """A client's patience is at its end."""
        if not self._is_under_way(visit):
            return
        if visit.replica is not None:
            visit.is_given_up, visit.is_timed_out = True, False
            self._gateway.abort(visit.replica, visit)
            return
        self._gateway.forget_held(visit)
        self._gateway.abandon(visit)
