"""Cost-aware: the cheapest replica whose estimated TTFT meets the target.

For fleets in which replicas have different prices, by hardware or by contract: cheap ones fill up to the
target first, expensive ones take the rest. If none meets the target, the replica of least estimated TTFT is
chosen, whatever its price. Estimates as in `ttft_estimates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.core.request import Request
from policies.routing import ReplicaView
from policies.routing.ttft_estimates import TtftEstimates, check_target


@dataclass(kw_only=True, slots=True)
class CostAware:
    """Cheapest replica in time. Equal prices: the least estimate, then the smallest index.

    Reads all queues.
    """

    ttft_s: float = 1.0
    """TTFT target in seconds."""
    initial_tokens_per_s: float = 10_000.0
    """Prefill rate of a replica in tokens per second, until one is measured."""
    _estimates: TtftEstimates = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_target(self.ttft_s, self.initial_tokens_per_s)
        self._estimates = TtftEstimates(self.initial_tokens_per_s)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """The cheapest replica that meets the target, or the fastest."""
        times_s = self._estimates.of_each(request, replicas)
        in_time = [
            (replica.price_usd_per_hour, time_s, place)
            for place, (replica, time_s) in enumerate(zip(replicas, times_s, strict=True))
            if time_s <= self.ttft_s
        ]
        place = min(in_time)[2] if in_time else times_s.index(min(times_s))
        self._estimates.sent_to(request, replicas[place], now)
        return place

    def on_first_token(self, request: Request, now: float) -> None:
        """Updates the measured rate of its replica."""
        self._estimates.first_token(request, now)

    def on_end(self, request: Request, now: float) -> None:
        """Forgets a request that has ended."""
        self._estimates.ended(request)
