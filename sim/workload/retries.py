"""Retries of clients after a refusal or a timeout: exponential backoff with jitter and a retry budget.

The wait between attempt k and attempt k + 1, with most = min(cap_s, base_s factor^(k - 1)) and w the previous
wait, at first base_s (Brooker, "Exponential Backoff And Jitter", AWS 2015):

    jitter          wait
    none            most
    full            uniform in [0, most]
    equal           uniform in [most / 2, most]
    decorrelated    min(cap_s, uniform in [base_s, factor w])

Without jitter, clients that are refused together retry together. A budget limits the load of retries: each
request adds retry_budget to a balance, which starts at its maximum retry_burst, and each retry takes 1 from
it or does not happen, as in Finagle (where deposits expire after 10 s and 10 retries per second are free) and
gRPC (where successes add to it). All clients share one balance, as if a proxy in front of the service kept
it. n requests have at most retry_burst + n retry_budget retries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from policies.prediction.draws import uniform
from sim.workload.checks import require_not_negative, require_positive

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
    """Longest wait, except where the service requests a longer one."""
    jitter: str = "full"
    """One of none, full, equal, decorrelated."""
    retry_budget: float | None = None
    """Retries per request, on average; null: no limit except max_attempts."""
    retry_burst: float = 10.0
    """Maximum of the budget's balance: further retries at the beginning and after quiet periods."""
    honours_retry_after: bool = True
    """Whether a client waits at least as long as a refusal requests."""
    timeout_s: float | None = None
    """Time after which a client gives up an attempt and sends the request again; null: no timeout."""
    timeout_until: str = "answer"
    """End of the time that timeout_s limits: the whole answer, or its first_token."""
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
        """Returns the time at which a request is sent again after a failed attempt; None: it is not.

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
