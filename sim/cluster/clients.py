"""Clients that abandon a request after their patience, time out an attempt, or retry."""

from __future__ import annotations

from simpy.events import ProcessGenerator

from policies.core.sequence import Sequence
from sim.cluster.gateway import Gateway
from sim.cluster.gateway_attachment import GatewayAttachment
from sim.cluster.request_attempt import RequestAttempt
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

    def submitted(self, attempt: RequestAttempt) -> None:
        if attempt.number == 1:
            self._retries.first_sent()
        if self._retries.timeout_s is not None:
            self._clock.begin(self._time_out(attempt, self._retries.timeout_s))

    def arrived(self, attempt: RequestAttempt) -> None:
        if self._patience_s is not None and self._is_in_progress(attempt):
            self._clock.begin(self._give_up(attempt, self._patience_s))

    def ends(self, attempt: RequestAttempt, replica: Replica, seq: Sequence) -> bool:
        if not attempt.is_timed_out:
            return False
        replica.recorder.events.timed_out(seq, self._clock.now)
        self._requests.lose(seq.request_id, in_crash=False)
        self._requests.forget_kv_transfer(seq.request_id)
        self._gateway.fail(attempt, "timed out")
        return True

    def will_retry(self, attempt: RequestAttempt, retry_after_s: float | None) -> bool:
        request_id, number = attempt.arrival.request.request_id, attempt.number
        again_s = self._retries.next_at(request_id, number, self._clock.now, retry_after_s)
        if again_s is None:
            return False
        self._clock.begin(self._retry(attempt, again_s))
        return True

    def _is_in_progress(self, attempt: RequestAttempt) -> bool:
        return self._gateway.attempts.get(attempt.arrival.request.request_id) is attempt

    def _is_at(self, attempt: RequestAttempt, number: int) -> bool:
        """Returns whether the request is in progress and in its attempt `number`."""
        return attempt.number == number and self._is_in_progress(attempt)

    def _retry(self, attempt: RequestAttempt, again_s: float) -> ProcessGenerator:
        """Sends a request again after the backoff of its client."""
        number = attempt.number
        yield self._clock.at(again_s, Phase.arrive)
        if self._is_at(attempt, number):
            attempt.begin_retry()
            self._requests.tries[attempt.arrival.request.request_id] += 1
            self._gateway.submit(attempt)

    def _time_out(self, attempt: RequestAttempt, timeout_s: float) -> ProcessGenerator:
        """Times out an attempt if its output, or its first token, takes longer than the client waits."""
        number = attempt.number
        yield self._clock.at(self._clock.now + timeout_s, Phase.arrive)
        if not self._is_at(attempt, number) or attempt.is_given_up:
            return
        if self._retries.waits_for_token and attempt.has_token:
            return
        if attempt.replica is not None:
            attempt.is_timed_out = True
            self._gateway.abort(attempt.replica, attempt)
        elif self._gateway.stop_holding(attempt):
            self._gateway.fail(attempt, "timed out")

    def _give_up(self, attempt: RequestAttempt, patience_s: float) -> ProcessGenerator:
        """Aborts a request after the patience of its client, which does not retry."""
        yield self._clock.at(self._clock.now + patience_s, Phase.arrive)
        if self._is_in_progress(attempt):
            self._gateway.give_up(attempt)
