"""What clients do whose requests are refused or take too long: they send them again, later, or give up.

The wait before attempt k + 1, where most = min(cap_s, base_s factor^(k - 1)), and w is the wait before it, or
base_s (Brooker, "Exponential Backoff And Jitter", AWS 2015):

    jitter          wait
    none            most
    full            uniform in [0, most]
    equal           uniform in [most / 2, most]
    decorrelated    min(cap_s, uniform in [base_s, factor w])

Clients that were refused together and wait without jitter come back together. A budget bounds what retries
add: each request puts retry_budget into an account that holds retry_burst at most, as at the beginning, and
each retry takes 1 out of it or does not happen, as in Finagle (there deposits expire after 10 s, and 10
retries a second are free) and gRPC (there successes pay in). It is one account for all clients, as a proxy
between them and the service keeps it. Of n requests come at most retry_burst + n retry_budget retries.
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
    """How often, when, and after what. One run's clients share an object: the budget is in it."""

    max_attempts: int = 4
    """The first included: 1 for clients who never try again."""
    base_s: float = 1.0
    factor: float = 2.0
    """By which the wait grows; AWS takes 3 with decorrelated jitter."""
    cap_s: float = 30.0
    """No wait is longer, but for one that the service asks for."""
    jitter: str = "full"
    """Or none, equal, decorrelated."""
    retry_budget: float | None = None
    """Retries per request; null: no bound but max_attempts."""
    retry_burst: float = 10.0
    """Retries beyond, at first and after quiet times."""
    honours_retry_after: bool = True
    """Waits at least as long as a refusal says."""
    timeout_s: float | None = None
    """After which a client gives an attempt up, and sends its request again; null: waits for ever."""
    timeout_until: str = "answer"
    """What it waits for: the whole answer, or its first_token."""
    seed: int = 0
    """Of the jitter."""
    _balance: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.max_attempts <= MAX_ATTEMPTS:
            raise ValueError(
                f"max_attempts={self.max_attempts}: must be >= 1, the first one, and <= {MAX_ATTEMPTS}"
            )
        require_not_negative(self, "base_s", "retry_budget", "retry_burst")
        require_positive(self, "timeout_s")
        if not 1 <= self.factor < inf:
            raise ValueError(f"factor={self.factor}: must be finite and >= 1, or waits would shrink")
        if not self.base_s <= self.cap_s < inf:
            raise ValueError(f"cap_s={self.cap_s}: must be finite and >= base_s={self.base_s:g} s")
        if self.jitter not in JITTERS:
            raise ValueError(f"jitter={self.jitter}: must be one of {', '.join(JITTERS)}")
        if self.retry_budget is not None and self.retry_burst < 1:
            raise ValueError(f"retry_burst={self.retry_burst}: must be >= 1, or no request is ever retried")
        if self.timeout_until not in ("answer", "first_token"):
            raise ValueError(f"timeout_until={self.timeout_until}: must be one of answer, first_token")
        self._balance = self.retry_burst

    @property
    def waits_for_token(self) -> bool:
        """Whether a client that has a token waits for the rest, however long."""
        return self.timeout_s is not None and self.timeout_until == "first_token"

    def first_sent(self) -> None:
        """A request was sent for the first time: it pays into the budget."""
        if self.retry_budget is not None:
            self._balance = min(self.retry_burst, self._balance + self.retry_budget)

    def next_at(
        self, request_id: int, attempt: int, now: float, retry_after_s: float | None = None
    ) -> float | None:
        """When a request is sent again whose attempt, counted from 1, has failed at `now`; None: never.

        To be asked once for each failure: a retry is paid for here. retry_after_s: what the refusal says
        (`policies.admission.Refusal`; inf, never to send it again, is believed by everybody); None for one
        that says nothing, and for a timeout.
        """
        if attempt >= self.max_attempts or retry_after_s == inf or not self._pay():
            return None
        wait_s = self.wait_s(request_id, attempt)
        if retry_after_s is not None and self.honours_retry_after:
            wait_s = max(wait_s, retry_after_s)
        return now + wait_s

    def wait_s(self, request_id: int, attempt: int) -> float:
        """From the failure of an attempt to the next one; a function of its arguments and the seed alone."""
        if self.jitter == "decorrelated":
            return self._decorrelated_s(request_id, attempt)
        most_s = self._most_s(attempt)
        if self.jitter == "none":
            return most_s
        share = self._draw(request_id, attempt)
        return most_s * (share if self.jitter == "full" else (1 + share) / 2)

    def _most_s(self, attempt: int) -> float:
        """base_s factor^(attempt - 1), capped before it overflows."""
        most_s = self.base_s
        for _ in range(attempt - 1):
            most_s = min(self.cap_s, most_s * self.factor)
        return most_s

    def _decorrelated_s(self, request_id: int, attempt: int) -> float:
        """Each wait depends on the one before: all are drawn again, so that nothing is kept of a request."""
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
