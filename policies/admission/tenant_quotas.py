"""Tenant quotas: fair shares of the outstanding load (DRF; Ghodsi et al., NSDI 2011).

The outstanding load is limited in requests and in prompt tokens. Below the limits every request is admitted.
Beyond them, the limits are divided by progressive filling: the dominant share of each tenant (the larger of
its shares of the two limits) divided by its weight rises equally for all tenants, each up to its outstanding
load, until a limit is reached. A request is admitted if its tenant's load, including the request, would be
filled completely. With a single limit this is weighted max-min fairness:

    limit 12, equal weights    A has 9, B 3           A is refused; B is admitted until it has 6
                               A has 6, B 6           both are refused
                               A has 9, B 2, C 1      B leaves 10: A is refused, C is admitted until it has 5

A tenant's share is its weight divided by the weights of all tenants with outstanding requests. A tenant
within its share is never refused because of others, and may also use the capacity that they leave. Requests
admitted beyond a share are not aborted when other tenants return, so the outstanding load can exceed the
limits until they finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated, NamedTuple

from fieldlimits import Checked, NonNegative, Positive, PositiveInt, Unit
from policies.admission import Refusal
from policies.core.request import Request
from policies.routing import ReplicaView

ROUNDING = 1 + 1e-9
"""Tolerance for rounding errors in sums of shares, so that a tenant with exactly its share is admitted."""


class Use(NamedTuple):
    """Outstanding requests and their prompt tokens."""

    num_requests: int = 0
    num_tokens: int = 0

    def plus(self, other: Use, sign: int = 1) -> Use:
        """Returns the sum, or with sign=-1 the difference."""
        return Use(self.num_requests + sign * other.num_requests, self.num_tokens + sign * other.num_tokens)


@dataclass(kw_only=True, slots=True)
class TenantQuotas(Checked):
    """Fair quotas per tenant. Reads only the number of replicas.

    Beyond the limits, the time of a decision is proportional to the number of tenants with outstanding
    requests.
    """

    max_outstanding: Annotated[PositiveInt, "or no request would be admitted"] = 256
    """Maximum number of outstanding requests per replica."""
    max_outstanding_tokens: Annotated[PositiveInt | None, "or no request would be admitted"] = None
    """Maximum number of their prompt tokens per replica; null: no limit."""
    tenant_weights: dict[str, Positive] = field(default_factory=dict)
    """Weights of the tenants' shares; 1 for tenants without an entry."""
    retry_after_s: Annotated[NonNegative | None, Unit("s"), "null for none"] = None
    """Retry-After in seconds sent to clients; null: none."""
    _uses: dict[str, Use] = field(init=False, default_factory=dict, repr=False, compare=False)
    _total: Use = field(init=False, default=Use(), repr=False, compare=False)

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """Refuses if the limits and the tenant's share are exceeded.

        A request to an idle service is always admitted.
        """
        limits = self._limits(len(replicas))
        own = Use(1, request.prompt.num_tokens)
        total = self._total.plus(own)
        use = self._uses.get(request.tenant, Use()).plus(own)
        if (
            self._total.num_requests
            and not _fits(total, limits)
            and not self._is_within_share(request.tenant, use, limits)
        ):
            return Refusal("tenant quota exceeded", self.retry_after_s)
        self._uses[request.tenant], self._total = use, total
        return None

    def on_end(self, request: Request, now: float) -> None:
        """Removes the request from the counts of its tenant."""
        own = Use(1, request.prompt.num_tokens)
        self._total = self._total.plus(own, -1)
        use = self._uses[request.tenant].plus(own, -1)
        if use.num_requests:
            self._uses[request.tenant] = use
        else:
            del self._uses[request.tenant]

    def _limits(self, num_replicas: int) -> tuple[float, float]:
        """Returns the limits of (requests, tokens) for all replicas in total."""
        num_tokens = inf if self.max_outstanding_tokens is None else self.max_outstanding_tokens
        return self.max_outstanding * num_replicas, num_tokens * num_replicas

    def _is_within_share(self, tenant: str, use: Use, limits: tuple[float, float]) -> bool:
        """Returns whether a tenant's load would be filled completely before a limit is reached."""
        level = self._level(tenant, use, limits)
        filled = list(map(float, use))
        for other, others_use in self._uses.items():
            if other != tenant:
                share = min(1.0, level / self._level(other, others_use, limits))
                filled = [have + share * part for have, part in zip(filled, others_use, strict=True)]
        return _fits(filled, [limit * ROUNDING for limit in limits])

    def _level(self, tenant: str, use: Use, limits: Sequence[float]) -> float:
        """Returns the dominant share of a tenant divided by its weight."""
        share = max(have / limit for have, limit in zip(use, limits, strict=True))
        return share / self.tenant_weights.get(tenant, 1.0)


def _fits(uses: Sequence[float], limits: Sequence[float]) -> bool:
    return all(use <= limit for use, limit in zip(uses, limits, strict=True))
