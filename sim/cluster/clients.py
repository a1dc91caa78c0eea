"""Clients that abandon a request after their patience, time out an attempt, or retry.

First tokens of requests are reported if the timeout of a client or a policy depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from simpy.events import ProcessGenerator

from policies.core.request import Request
from policies.core.sequence import Sequence
from sim.cluster.gateway import Gateway, GatewayAttachment, RequestAttempt, Routers
from sim.engine.attachment import Attachment
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


class FirstTokens:
    """Notifies routers, the admission policy and clients of the first token of each request.

    notify_admission: the hook of the admission policy. is_waited_for: whether the timeout of the clients ends
    with the first token. attempts: the attempts in progress, by request id.
    """

    def __init__(
        self,
        routers: Routers,
        notify_admission: Callable[[Request, float], None] | None,
        *,
        is_waited_for: bool,
        attempts: Mapping[int, RequestAttempt],
        clock: Clock,
    ) -> None:
        self._routers = routers
        self._notify_admission = notify_admission
        self._is_wanted = is_waited_for or notify_admission is not None or routers.see_first_tokens
        self._attempts = attempts
        self._clock = clock
        self._of_replica: dict[int, FirstTokensOfReplica] = {}
        self.on_notify: Callable[[int], None] | None = None
        """Is called with the id of each request of which the policies are notified."""

    def attach_to(self, replica: Replica) -> None:
        """Attaches a listener for first tokens to a replica, if any policy or client needs them."""
        if self._is_wanted:
            listener = self._of_replica[replica.index] = FirstTokensOfReplica(self.notify)
            replica.attach(listener)

    def resumes(self, request_id: int, replica: Replica) -> None:
        """Marks a request as continued in a replica after the crash of another one."""
        if replica.index in self._of_replica:
            self._of_replica[replica.index].resumes(request_id)

    def notify(self, request_id: int) -> None:
        """Notifies the policies of the first token of a request, from any replica."""
        attempt = self._attempts[request_id]
        request, now = attempt.arrival.request, self._clock.now
        notify_router = self._routers[request.model].on_first_token
        if notify_router is not None:
            notify_router(request, now)
        if self._notify_admission is not None and not attempt.has_token:
            self._notify_admission(request, now)
        attempt.has_token = True
        if self.on_notify is not None:
            self.on_notify(request_id)


class FirstTokensOfReplica(Attachment):
    """Calls on_first_token(request_id) with every first token that a replica produces for an attempt."""

    def __init__(self, on_first_token: Callable[[int], None]) -> None:
        self._on_first_token = on_first_token
        self._resumed: set[int] = set()  # ids of continued requests that have no token from here yet

    def resumes(self, request_id: int) -> None:
        """Marks a request as continued here: its next token counts as its first from this replica."""
        self._resumed.add(request_id)

    def prefilled(self, seq: Sequence, now: float) -> None:
        if seq.request_id in self._resumed:
            self._resumed.remove(seq.request_id)
        elif seq.num_output_tokens != 1:
            return
        self._on_first_token(seq.request_id)

    def left(self, seq: Sequence) -> None:
        self._resumed.discard(seq.request_id)

    def crashed(self, now: float) -> None:
        self._resumed.clear()
