"""SLO-aware routing: the busiest or cheapest replica whose estimated TTFT meets the target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fieldlimits import Checked, OneOf, Positive, Unit, check
from policies.core.request import Request
from policies.routing import ReplicaView

SMOOTHING = 0.1
"""Weight of a new measurement in the moving average."""


class TtftEstimates:
    """Measured prefill rates by index of a replica (or other server), and requests without a first token.

    Estimates the TTFT of a request on each replica: the queued prompt tokens divided by a measured rate.

        estimate = (prompt tokens of requests without a first token + this prompt's tokens) / replica's rate

    When a request gets its first token, the tokens of its estimate divided by the time since it was sent are
    a new measurement of the rate for an exponential moving average. Until the first measurement the rate is
    initial_tokens_per_s. The rate therefore includes the average effects of cache hits and running decodes.
    """

    def __init__(self, initial_tokens_per_s: float) -> None:
        self._initial_tokens_per_s = initial_tokens_per_s
        self._tokens_per_s: dict[int, float] = {}
        self._awaited: dict[int, tuple[int, int, float]] = {}  # replica, tokens in its estimate, time sent

    def estimate_s(self, index: int, num_tokens: int) -> float:
        """Returns the TTFT in seconds with num_tokens queued tokens, including the request's prompt."""
        return num_tokens / self._tokens_per_s.get(index, self._initial_tokens_per_s)

    def all_s(self, request: Request, replicas: Sequence[ReplicaView]) -> list[float]:
        """Returns the estimated TTFT of a request on each replica, in seconds."""
        num_own, estimate_s = request.prompt.num_tokens, self.estimate_s
        return [estimate_s(replica.index, replica.num_queued_tokens + num_own) for replica in replicas]

    def sent(self, request: Request, index: int, num_tokens: int, now: float) -> None:
        """Records that a request was sent to a replica; num_tokens: the tokens of its estimate."""
        self._awaited[request.request_id] = index, num_tokens, now

    def sent_to(self, request: Request, replica: ReplicaView, now: float) -> None:
        """Records that a request is sent to a replica; called before the replica counts it."""
        num_tokens = replica.num_queued_tokens + request.prompt.num_tokens
        self.sent(request, replica.index, num_tokens, now)

    def first_token(self, request: Request, now: float) -> None:
        """Updates the rate of a replica when a request gets its first token."""
        index, num_tokens, sent_s = self._awaited.pop(request.request_id)
        if now > sent_s:
            measured = num_tokens / (now - sent_s)
            known = self._tokens_per_s.get(index, measured)
            self._tokens_per_s[index] = known + SMOOTHING * (measured - known)

    def ended(self, request: Request) -> None:
        """Removes a request that has ended, possibly before its first token."""
        self._awaited.pop(request.request_id, None)


@dataclass(kw_only=True, slots=True)
class SloAware(Checked):
    """A replica that meets a TTFT target. Ties go to the smallest index. Reads the queues of all replicas.

    As in the Gateway API Inference Extension's latency-aware scorer. A replica's headroom is the target less
    its estimated TTFT. By default the replica with the least headroom that meets the target is chosen, which
    keeps the others free for long prompts; with headroom=most, the one with the lowest estimate. If no
    replica meets the target, the one with the lowest estimate is chosen. The extension predicts latency with
    a trained model; here the estimate is the queued tokens divided by a measured rate (`TtftEstimates`).
    """

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
        """Returns a replica that meets the target, or the one with the lowest estimated TTFT."""
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


@dataclass(kw_only=True, slots=True)
class CostAware(Checked):
    """Cheapest replica within the TTFT target. Ties: least estimate, then smallest index.

    Reads all queues.

    It is meant for fleets of replicas with different prices, due to hardware or contract: the cheap ones are
    filled up to the target first, the expensive ones get the remaining requests. If no replica meets the
    target, the one with the lowest estimated TTFT is chosen at any price. The estimates are those of
    `TtftEstimates`.
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
        """Returns the cheapest replica that meets the target, or the one with the lowest estimated TTFT."""
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
