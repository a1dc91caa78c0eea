"""SLO-aware: a replica whose estimated TTFT meets the target.

After the Gateway API Inference Extension's latency-aware scorer. By default it takes, of the replicas with
headroom, the one with the least, which keeps the others free for long prompts; or the one with the most,
which has the least estimate. If none has headroom, the least estimate wins. The extension predicts latency by
a trained model; here the estimate is tokens in front over a measured rate (`ttft_estimates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.core.request import Request
from policies.routing import ReplicaView
from policies.routing.ttft_estimates import TtftEstimates, check_target


@dataclass(kw_only=True, slots=True)
class SloAware:
    """Replica that meets a TTFT target. Ties go to the smallest index. Reads the queues of all replicas."""

    ttft_s: float = 1.0
    """TTFT target in seconds."""
    headroom: str = "least"
    """The replica chosen among those that meet the target: the one with the least or the most headroom."""
    initial_tokens_per_s: float = 10_000.0
    """Prefill rate of a replica in tokens per second, until one is measured."""
    _estimates: TtftEstimates = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_target(self.ttft_s, self.initial_tokens_per_s)
        if self.headroom not in ("least", "most"):
            raise ValueError(f"headroom={self.headroom}: must be one of least, most")
        self._estimates = TtftEstimates(self.initial_tokens_per_s)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """A replica that will answer in time, or the one that will answer first."""
        times_s = self._estimates.of_each(request, replicas)
        in_time_s = [time_s for time_s in times_s if time_s <= self.ttft_s]
        chosen_s = max(in_time_s) if in_time_s and self.headroom == "least" else min(times_s)
        place = times_s.index(chosen_s)
        self._estimates.sent_to(request, replicas[place], now)
        return place

    def on_first_token(self, request: Request, now: float) -> None:
        """Updates the measured rate of its replica."""
        self._estimates.first_token(request, now)

    def on_end(self, request: Request, now: float) -> None:
        """Forgets a request that has ended."""
        self._estimates.ended(request)
