"""Cost-aware routing: the cheapest replica with an estimated TTFT within the target.

It is meant for fleets of replicas with different prices, by hardware or by contract: the cheap ones are
filled up to the target first, the expensive ones get the remaining requests. If no replica meets the target,
the one of least estimated TTFT is chosen, whatever its price. The estimates are those of `ttft_estimates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fieldlimits import Checked, Positive, Unit, check
from policies.core.request import Request
from policies.routing import ReplicaView
from policies.routing.ttft_estimates import TtftEstimates


@dataclass(kw_only=True, slots=True)
class CostAware(Checked):
    """Cheapest replica within the TTFT target. Ties: least estimate, then smallest index.

    Reads all queues.
    """

    ttft_s: Annotated[Positive, Unit("s")] = 1.0
    """TTFT target in seconds."""
    initial_tokens_per_s: Annotated[Positive, Unit("tokens/s")] = 10_000.0
    """Prefill rate of a replica in tokens per second, until one is measured."""
    _estimates: TtftEstimates = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self)
        self._estimates = TtftEstimates(self.initial_tokens_per_s)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the cheapest replica that meets the target, or the one of least estimated TTFT."""
        times_s = self._estimates.all_s(request, replicas)
        in_time = [
            (replica.price_usd_per_hour, time_s, position)
            for position, (replica, time_s) in enumerate(zip(replicas, times_s, strict=True))
            if time_s <= self.ttft_s
        ]
        position = min(in_time)[2] if in_time else times_s.index(min(times_s))
        self._estimates.sent_to(request, replicas[position], now)
        return position

    def on_first_token(self, request: Request, now: float) -> None:
        """Updates the measured prefill rate of the request's replica."""
        self._estimates.first_token(request, now)

    def on_end(self, request: Request, now: float) -> None:
        """Removes a request that has ended."""
        self._estimates.ended(request)
