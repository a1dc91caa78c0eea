"""Cost-aware: the cheapest replica whose estimated TTFT meets the target.

For fleets in which replicas cost differently, by hardware or by contract: cheap ones fill up to the target
first, dear ones take what is left. If none meets it, the least estimate, whatever the price. Estimates as in
`ttft_estimates`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.request import Request
from policies.routing import ReplicaView, check_by_replica, check_positive
from policies.routing.ttft_estimates import TtftEstimates, check_target


@dataclass(kw_only=True, slots=True)
class CostAware:
    """Of equal prices the least estimate, then the smallest index. Reads the queues of all replicas."""

    prices_usd_per_hour: tuple[float, ...] = ()
    """By replica; none: all alike."""
    ttft_s: float = 1.0
    """Target."""
    initial_tokens_per_s: float = 10_000.0
    """Rate at which a replica gets through prompts, until one is measured."""
    _estimates: TtftEstimates = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_positive("prices_usd_per_hour", self.prices_usd_per_hour)
        check_target(self.ttft_s, self.initial_tokens_per_s)
        self._estimates = TtftEstimates(self.initial_tokens_per_s)

    def check(self, num_replicas: int) -> None:
        """Raise ValueError unless there is a price for each replica."""
        check_by_replica("prices_usd_per_hour", self.prices_usd_per_hour, num_replicas)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """The cheapest in time, or the fastest."""
        num_own, estimate_s = request.prompt.num_tokens, self._estimates.estimate_s
        tokens = [replica.num_queued_tokens + num_own for replica in replicas]
        times_s = [estimate_s(index, num_tokens) for index, num_tokens in enumerate(tokens)]
        prices = self.prices_usd_per_hour or (1.0,) * len(replicas)
        in_time = [
            (price, time_s, index)
            for index, (price, time_s) in enumerate(zip(prices, times_s, strict=True))
            if time_s <= self.ttft_s
        ]
        index = min(in_time)[2] if in_time else times_s.index(min(times_s))
        self._estimates.sent(request, index, tokens[index], now)
        return index

    def on_first_token(self, request: Request, now: float) -> None:
        """Learn how fast its replica is."""
        self._estimates.first_token(request, now)

    def on_end(self, request: Request, now: float) -> None:
        """Await it no more."""
        self._estimates.ended(request)
