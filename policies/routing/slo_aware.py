"""SLO-aware: a replica whose estimated TTFT meets the target.

After the Gateway API Inference Extension's latency-aware scorer: of the replicas with headroom, the one with
the least, its default, which keeps the others free for long prompts; or the one with the most, which is the
least estimate. If none has any, the least estimate. The extension predicts latency by a trained model; here
the estimate is tokens in front over a measured rate (`ttft_estimates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.core.request import Request
from policies.routing import ReplicaView
from policies.routing.ttft_estimates import TtftEstimates, check_target


@dataclass(kw_only=True, slots=True)
class SloAware:
    """Ties go to the smallest index. Reads the queues of all replicas."""

    ttft_s: float = 1.0
    """Target."""
    headroom: str = "least"
    """Which of those that meet it: the one that meets it by the least, or by the most."""
    initial_tokens_per_s: float = 10_000.0
    """Rate at which a replica gets through prompts, until one is measured."""
    _estimates: TtftEstimates = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_target(self.ttft_s, self.initial_tokens_per_s)
        if self.headroom not in ("least", "most"):
            raise ValueError(f"headroom={self.headroom}: must be one of least, most")
        self._estimates = TtftEstimates(self.initial_tokens_per_s)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """A replica that will answer in time, or the first that will answer at all."""
        times_s = self._estimates.of_each(request, replicas)
        in_time_s = [time_s for time_s in times_s if time_s <= self.ttft_s]
        chosen_s = max(in_time_s) if in_time_s and self.headroom == "least" else min(times_s)
        place = times_s.index(chosen_s)
        self._estimates.sent_to(request, replicas[place], now)
        return place

    def on_first_token(self, request: Request, now: float) -> None:
        """Learn how fast its replica is."""
        self._estimates.first_token(request, now)

    def on_end(self, request: Request, now: float) -> None:
        """Await it no more."""
        self._estimates.ended(request)
