"""SLO-aware routing: a replica with an estimated TTFT within the target.

As in the Gateway API Inference Extension's latency-aware scorer. A replica's headroom is the target less its
estimated TTFT. By default the replica with the least headroom that meets the target is chosen, which keeps
the others free for long prompts; with headroom=most the one with the least estimate. If no replica meets the
target, the least estimate is chosen. The extension predicts latency by a trained model; here the estimate is
the queued tokens divided by a measured rate (`ttft_estimates`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fieldlimits import Checked, OneOf, Positive, Unit, check
from policies.core.request import Request
from policies.routing import ReplicaView
from policies.routing.ttft_estimates import TtftEstimates


@dataclass(kw_only=True, slots=True)
class SloAware(Checked):
    """A replica that meets a TTFT target. Ties go to the smallest index. Reads the queues of all replicas."""

    ttft_s: Annotated[Positive, Unit("s")] = 1.0
    """TTFT target in seconds."""
    headroom: Annotated[str, OneOf(("least", "most"))] = "least"
    """The replica chosen among those that meet the target: the one with the least or the most headroom."""
    initial_tokens_per_s: Annotated[Positive, Unit("tokens/s")] = 10_000.0
    """Prefill rate of a replica in tokens per second, until one is measured."""
    _estimates: TtftEstimates = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self)
        self._estimates = TtftEstimates(self.initial_tokens_per_s)

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns a replica that meets the target, or the one of least estimated TTFT."""
        times_s = self._estimates.all_s(request, replicas)
        in_time_s = [time_s for time_s in times_s if time_s <= self.ttft_s]
        chosen_s = max(in_time_s) if in_time_s and self.headroom == "least" else min(times_s)
        position = times_s.index(chosen_s)
        self._estimates.sent_to(request, replicas[position], now)
        return position

    def on_first_token(self, request: Request, now: float) -> None:
        """Updates the measured prefill rate of the request's replica."""
        self._estimates.first_token(request, now)

    def on_end(self, request: Request, now: float) -> None:
        """Removes a request that has ended."""
        self._estimates.ended(request)
