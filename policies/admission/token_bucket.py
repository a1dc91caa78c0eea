"""Token bucket: a rate, and a burst above it (Turner, IEEE Communications Magazine 1986).

A bucket holds at most `burst` and gains `rate_per_s` per second. A request takes 1 out of it, or its tokens,
and is refused if there is not enough: in any t seconds no more than burst + rate_per_s t is admitted. Tokens
are those known before the answer, as Azure OpenAI counts them for its limits: those of the prompt, and
max_tokens of each answer where the client sets it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, ulp

from policies.admission import Refusal, check_choice
from policies.core.request import Request
from policies.routing import ReplicaView

NUM_SWEPT = 2
"""Number of buckets checked per request, to forget those that are full again."""


@dataclass(kw_only=True, slots=True)
class TokenBucket:
    """Rate limit. Reads no replica; a refused request takes nothing."""

    rate_per_s: float = 10.0
    """Requests, or tokens, per second."""
    burst: float = 20.0
    """Most that can be admitted at once; a request of more tokens never is."""
    count: str = "requests"
    """What is counted: requests or tokens."""
    per: str = "service"
    """One bucket for the whole service, or one per tenant."""
    _buckets: OrderedDict[str, tuple[float, float]] = field(
        init=False, default_factory=OrderedDict, repr=False, compare=False
    )  # level, time in seconds; full buckets may be missing

    def __post_init__(self) -> None:
        if not 0 < self.rate_per_s < inf:
            raise ValueError(f"rate_per_s={self.rate_per_s}: must be finite and > 0 a second")
        if not 1 <= self.burst < inf:
            raise ValueError(f"burst={self.burst}: must be finite and >= 1, or no request is ever admitted")
        check_choice("count", self.count, ("requests", "tokens"))
        check_choice("per", self.per, ("service", "tenant"))

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """Takes the cost of the request out of its bucket; refuses if there is not enough."""
        self._sweep(now)
        tenant = request.tenant if self.per == "tenant" else ""
        cost = 1 if self.count == "requests" else _num_tokens(request)
        if cost > self.burst:
            return Refusal("more tokens than the burst of the rate limit", inf)
        level = self._level(tenant, now)
        if level < cost:
            return Refusal(f"rate limit of the {self.per}", self._wait_s(tenant, cost, now))
        self._buckets[tenant] = level - cost, now
        return None

    def _level(self, tenant: str, now: float) -> float:
        """Level of a bucket at a time."""
        if tenant not in self._buckets:
            return self.burst
        level, since_s = self._buckets[tenant]
        return min(self.burst, level + (now - since_s) * self.rate_per_s)

    def _wait_s(self, tenant: str, cost: float, now: float) -> float:
        """Seconds until the bucket holds the cost without other requests.

        Rounded up, so that it really does.
        """
        wait_s = (cost - self._level(tenant, now)) / self.rate_per_s
        while self._level(tenant, now + wait_s) < cost:
            wait_s += ulp(now + wait_s)
        return wait_s

    def _sweep(self, now: float) -> None:
        """Forgets some buckets that are full, so that tenants with one request are not kept for ever."""
        for _ in range(min(NUM_SWEPT, len(self._buckets))):
            tenant = next(iter(self._buckets))
            if self._level(tenant, now) == self.burst:
                del self._buckets[tenant]
            else:
                self._buckets.move_to_end(tenant)


def _num_tokens(request: Request) -> int:
    """Tokens of the prompt, and the maximum of the answers."""
    width = 1 if request.branching is None else request.branching.width
    return request.prompt.num_tokens + width * (request.max_tokens or 0)
