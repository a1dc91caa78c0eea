"""Clients that abandon a request after their patience, time out an attempt, or retry.

First tokens of requests are reported if the timeout of a client or a policy depends on them.

Retries follow a refusal or a timeout, by exponential backoff with jitter and a retry budget. The wait between
attempt k and attempt k + 1, with most = min(cap_s, base_s factor^(k - 1)) and w the previous wait, initially
base_s (Brooker, "Exponential Backoff And Jitter", AWS 2015):

    jitter          wait
    none            most
    full            uniform in [0, most]
    equal           uniform in [most / 2, most]
    decorrelated    min(cap_s, uniform in [base_s, factor w])

Without jitter, clients that are refused together retry together. A budget limits the load of retries: each
request adds retry_budget to a balance, which starts at its maximum retry_burst, and each retry takes 1 from
it or is not made, as in Finagle (where deposits expire after 10 s and 10 retries per second are free) and
gRPC (where successes add to it). All clients share one balance, as with a proxy in front of the service. n
requests have at most retry_burst + n retry_budget retries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from simpy.events import ProcessGenerator

from policies.core.sequence import Sequence
from policies.prediction import uniform
from sim.cluster.gateway import Gateway, GatewayAttachment, RequestAttempt
from sim.engine.attachment import Attachment
from sim.engine.clock import Clock, Phase
from sim.engine.replica import Replica
from sim.records.requests import RequestLog
from sim.workload.distributions import require_not_negative, require_positive

JITTERS = ("none", "full", "equal", "decorrelated")
MAX_ATTEMPTS = 1000


@dataclass(kw_only=True, slots=True)
class Retries:
    """Retries of the clients of one run, which share this object because it holds the retry budget."""

    max_attempts: int = 4
    """Attempts per request, including the first; 1: no retries."""
    base_s: float = 1.0
    """Wait before the first retry."""
    factor: float = 2.0
    """Growth of the wait from retry to retry; AWS uses 3 with decorrelated jitter."""
    cap_s: float = 30.0
    """Maximum wait, unless the service requests a longer one."""
    jitter: str = "full"
    """One of none, full, equal, decorrelated."""
    retry_budget: float | None = None
    """Average number of retries per request; null: no limit except max_attempts."""
    retry_burst: float = 10.0
    """Maximum of the budget's balance: additional retries at the beginning and after quiet periods."""
    honours_retry_after: bool = True
    """Whether a client waits at least as long as a refusal asks."""
    timeout_s: float | None = None
    """Time after which a client gives up an attempt and resends the request; null: no timeout."""
    timeout_until: str = "answer"
    """End of the time limited by timeout_s: the complete output, or its first_token."""
    seed: int = 0
    """Seed of the jitter."""
    _balance: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= MAX_ATTEMPTS:
            raise ValueError(
                f"max_attempts={self.max_attempts}: must be >= 1 (no retries) and <= {MAX_ATTEMPTS}"
            )
        require_not_negative(self, "base_s", "retry_budget", "retry_burst")
        require_positive(self, "timeout_s")
        if not 1 <= self.factor < inf:
            raise ValueError(f"factor={self.factor}: must be finite and >= 1")
        if not self.base_s <= self.cap_s < inf:
            raise ValueError(f"cap_s={self.cap_s}: must be finite and >= base_s={self.base_s:g} s")
        if self.jitter not in JITTERS:
            raise ValueError(f"jitter={self.jitter}: must be one of {', '.join(JITTERS)}")
        if self.retry_budget is not None and self.retry_burst < 1:
            raise ValueError(
                f"retry_burst={self.retry_burst}: must be >= 1; a retry takes 1 from the balance"
            )
        if self.timeout_until not in ("answer", "first_token"):
            raise ValueError(f"timeout_until={self.timeout_until}: must be one of answer, first_token")
        self._balance = self.retry_burst

    @property
    def waits_for_token(self) -> bool:
        """True if the timeout ends with the first token."""
        return self.timeout_s is not None and self.timeout_until == "first_token"

    def first_sent(self) -> None:
        """Adds to the retry budget, for a request that is sent for the first time."""
        if self.retry_budget is not None:
            self._balance = min(self.retry_burst, self._balance + self.retry_budget)

    def next_at(
        self, request_id: int, attempt: int, now: float, retry_after_s: float | None = None
    ) -> float | None:
        """Returns the time at which a request is resent after a failed attempt; None: it is not resent.

        Must be called once per failure, because it takes from the retry budget. attempt: number of the failed
        attempt, from 1. retry_after_s: the wait that the refusal requests (`policies.admission.Refusal`; with
        inf no client retries); None for a refusal without one and for a timeout.
        """
        if attempt >= self.max_attempts or retry_after_s == inf or not self._pay():
            return None
        wait_s = self.wait_s(request_id, attempt)
        if retry_after_s is not None and self.honours_retry_after:
            wait_s = max(wait_s, retry_after_s)
        return now + wait_s

    def wait_s(self, request_id: int, attempt: int) -> float:
        """Returns the seconds from a failed attempt to the next, a function of the arguments and the seed."""
        if self.jitter == "decorrelated":
            return self._decorrelated_s(request_id, attempt)
        most_s = self._most_s(attempt)
        if self.jitter == "none":
            return most_s
        share = self._draw(request_id, attempt)
        return most_s * (share if self.jitter == "full" else (1 + share) / 2)

    def _most_s(self, attempt: int) -> float:
        """Computes min(cap_s, base_s factor^(attempt - 1)) without overflow."""
        most_s = self.base_s
        for _ in range(attempt - 1):
            most_s = min(self.cap_s, most_s * self.factor)
        return most_s

    def _decorrelated_s(self, request_id: int, attempt: int) -> float:
        """Computes the wait with decorrelated jitter; draws earlier waits again instead of storing them."""
        wait_s = self.base_s
        for number in range(1, attempt + 1):
            range_s = max(0.0, wait_s * self.factor - self.base_s)
            wait_s = min(self.cap_s, self.base_s + range_s * self._draw(request_id, number))
        return wait_s

    def _draw(self, request_id: int, attempt: int) -> float:
        return uniform(self.seed, f"retries/{attempt}", request_id)

    def _pay(self) -> bool:
        if self.retry_budget is None:
            return True
        if self._balance < 1:
            return False
        self._balance -= 1
        return True


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
            self._requests.begin_try(attempt.arrival.request.request_id, attempt.number)
            self._gateway.submit(attempt)

    def _time_out(self, attempt: RequestAttempt, timeout_s: float) -> ProcessGenerator:
        """Times out an attempt if its output or first token takes longer than the client's timeout."""
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
    """Notifies the gateway of the first token of each request.

    are_wanted: whether a policy reads first tokens, or the timeout of the clients ends with them.
    """

    def __init__(self, gateway: Gateway, *, are_wanted: bool) -> None:
        self._gateway = gateway
        self._are_wanted = are_wanted
        self._of_replica: dict[int, FirstTokensOfReplica] = {}
        self.on_notify: Callable[[int], None] | None = None
        """Is called with the id of each request of which the policies are notified."""

    def attach_to(self, replica: Replica) -> None:
        """Attaches a listener for first tokens to a replica, if any policy or client needs them."""
        if self._are_wanted:
            listener = self._of_replica[replica.index] = FirstTokensOfReplica(self.notify)
            replica.attach(listener)

    def resumes(self, request_id: int, replica: Replica) -> None:
        """Marks a request as continued in a replica after the crash of another one."""
        if replica.index in self._of_replica:
            self._of_replica[replica.index].resumes(request_id)

    def notify(self, request_id: int) -> None:
        """Notifies the policies of the first token of a request, from any replica."""
        self._gateway.first_token(request_id)
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
