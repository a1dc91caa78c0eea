"""Token bucket: a rate limit with bursts (Turner, IEEE Communications Magazine 1986).

A bucket's level rises by `rate_per_s` per second up to `burst`. A request takes 1, or its number of tokens,
out of the bucket, and is refused if the level is too low: in any t seconds at most burst + rate_per_s * t is
admitted. The number of tokens is known before generation, as Azure OpenAI counts it for its limits: the
tokens of the prompt, and max_tokens of each output if the client sets it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf, ulp
from typing import Annotated

from fieldlimits import FINITE, Checked, Ge, OneOf, Positive, Unit
from policies.admission import Refusal
from policies.core.request import Request
from policies.routing import ReplicaView

NUM_SWEPT = 2
"""Number of buckets checked per request, to delete full ones."""


@dataclass(kw_only=True, slots=True)
class TokenBucket(Checked):
    """Rate limit. Reads no replica; a refused request consumes nothing."""

    rate_per_s: Annotated[Positive, Unit("per second")] = 10.0
    """Requests or tokens per second."""
    burst: Annotated[float, Ge(1), FINITE, "or no request would be admitted"] = 20.0
    """Maximum number of requests or tokens admitted at once; larger requests are never admitted."""
    count: Annotated[str, OneOf(("requests", "tokens"))] = "requests"
    """Counted quantity: requests or tokens."""
    per: Annotated[str, OneOf(("service", "tenant"))] = "service"
    """Scope: service (one bucket for all requests) or tenant (one bucket each)."""
    _buckets: OrderedDict[str, tuple[float, float]] = field(
        init=False, default_factory=OrderedDict, repr=False, compare=False
    )  # level, time in seconds; full buckets may be missing

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """Takes the request's cost out of its bucket; refuses the request if the level is too low."""
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
        """Returns the level of a bucket at a time."""
        if tenant not in self._buckets:
            return self.burst
        level, since_s = self._buckets[tenant]
        return min(self.burst, level + (now - since_s) * self.rate_per_s)

    def _wait_s(self, tenant: str, cost: float, now: float) -> float:
        """Returns the seconds until the bucket's level is enough, if there are no other requests.

        The time is rounded up, so a request at that time is admitted.
        """
        wait_s = (cost - self._level(tenant, now)) / self.rate_per_s
        while self._level(tenant, now + wait_s) < cost:
            wait_s += ulp(now + wait_s)
        return wait_s

    def _sweep(self, now: float) -> None:
        """Deletes some of the full buckets, so that memory does not grow with the number of past tenants."""
        for _ in range(min(NUM_SWEPT, len(self._buckets))):
            tenant = next(iter(self._buckets))
            if self._level(tenant, now) == self.burst:
                del self._buckets[tenant]
            else:
                self._buckets.move_to_end(tenant)


def _num_tokens(request: Request) -> int:
    """Returns the tokens of the prompt plus the maximum tokens of the outputs."""
    width = 1 if request.branching is None else request.branching.width
    return request.prompt.num_tokens + width * (request.max_tokens or 0)
