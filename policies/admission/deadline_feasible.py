"""Deadline-feasible: refuses a request at once if its estimated first token would miss its deadline.

estimated TTFT = (queued prompt tokens / replicas + this prompt's) / rate of a replica, times safety The
rate is measured as in `policies.routing.slo_aware.TtftEstimates`, but for the whole fleet, assuming that
the router spreads the queue evenly. Mooncake (2024) calls this early rejection. While no request waits
for its first token, every request is admitted regardless of its estimate: otherwise a rate measured under
a different load could never be corrected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Annotated

from fieldlimits import Checked, NonNegative, Positive, Unit, check
from policies.admission import Refusal
from policies.admission.queue_bound import Outstanding
from policies.core.request import Request
from policies.routing import ReplicaView
from policies.routing.slo_aware import TtftEstimates
from policies.scheduling.deadlines import TimesByPriority, by_priority

FLEET = 0
"""The only index of the estimates, because there is one rate for all replicas."""


@dataclass(kw_only=True, slots=True)
class DeadlineFeasible(Checked):
    """Refuses requests that would miss their deadline. Reads only the number of replicas."""

    ttft_s: TimesByPriority = (1.0,)
    """TTFT targets in seconds for priority 0, 1, ...; the last one applies to all higher numbers. They apply
    to requests without deadline_s.
    """
    tpot_s: Annotated[NonNegative, Unit("s")] = 0.0
    """Time in seconds per output token (max_tokens of the request) reserved before its deadline_s."""
    initial_tokens_per_s: Positive = 10_000.0
    """Prefill rate of a replica in tokens per second, until one is measured."""
    safety: Positive = 1.0
    """Factor on the estimated TTFT; above 1, more requests are refused."""
    _outstanding: Outstanding = field(init=False, default_factory=Outstanding, repr=False, compare=False)
    _estimates: TtftEstimates = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check(self)
        self.ttft_s = tuple(self.ttft_s)
        self._estimates = TtftEstimates(self.initial_tokens_per_s)

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """Refuses a request if its first token is expected after its deadline."""
        left_s = self._due_s(request) - now
        if left_s < 0:
            return Refusal("TTFT deadline has passed", inf)
        num_queued = self._outstanding.num_queued_tokens
        num_tokens = num_queued // len(replicas) + request.prompt.num_tokens
        late_s = self._estimates.estimate_s(FLEET, num_tokens) * self.safety - left_s
        if num_queued and late_s > 0:  # after this time the queue is short enough for a retry
            return Refusal("TTFT deadline would be missed", late_s / self.safety)
        self._outstanding.admit(request)
        self._estimates.sent(request, FLEET, num_tokens, now)
        return None

    def on_first_token(self, request: Request, now: float) -> None:
        """Updates the measured prefill rate of the fleet."""
        self._outstanding.first_token(request)
        self._estimates.first_token(request, now)

    def on_end(self, request: Request, now: float) -> None:
        """Removes a request that has ended."""
        self._outstanding.end(request)
        self._estimates.ended(request)

    def _due_s(self, request: Request) -> float:
        """Returns the deadline of a request's first token, in seconds."""
        if request.deadline_s is None:
            return request.arrival_s + by_priority(self.ttft_s, request)
        return request.deadline_s - (request.max_tokens or 0) * self.tpot_s
