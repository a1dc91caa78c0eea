"""Deadline-feasible: a request whose first token would come too late is refused at once.

    estimated TTFT = (queued prompt tokens / replicas + this prompt's) / rate of a replica, times safety

The rate is measured, as in `policies.routing.ttft_estimates`, on the fleet as a whole: it assumes that the
router spreads the queue evenly. Mooncake (2024) calls this early rejection.
While no request waits for a first token, a request is admitted whatever the estimate says: a rate that was
measured under another load could never be corrected otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from policies.admission import Refusal
from policies.admission.outstanding import Outstanding
from policies.core.request import Request
from policies.routing import ReplicaView
from policies.routing.ttft_estimates import TtftEstimates
from policies.scheduling.edf import by_priority, check_by_priority

FLEET = 0
"""The only index of the estimates: one rate for all replicas."""


@dataclass(kw_only=True, slots=True)
class DeadlineFeasible:
    """Refuses requests that would be late. Reads the number of replicas, and nothing of their state."""

    ttft_s: tuple[float, ...] = (1.0,)
    """TTFT target for priority 0, 1, ...; the last holds for all beyond.

    A request's deadline_s replaces it.
    """
    tpot_s: float = 0.0
    """Time before its deadline_s, in seconds, that a request needs for each of its max_tokens."""
    initial_tokens_per_s: float = 10_000.0
    """Prefill rate of a replica in tokens per second, until one is measured."""
    safety: float = 1.0
    """Factor on the estimate: above 1 refuses more, as estimates err."""
    _outstanding: Outstanding = field(init=False, default_factory=Outstanding, repr=False, compare=False)
    _estimates: TtftEstimates = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.ttft_s = tuple(self.ttft_s)
        check_by_priority("ttft_s", self.ttft_s)
        if not 0 <= self.tpot_s < inf:
            raise ValueError(f"tpot_s={self.tpot_s}: must be finite and >= 0 s")
        for name in ("initial_tokens_per_s", "safety"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be finite and > 0")
        self._estimates = TtftEstimates(self.initial_tokens_per_s)

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """Refuses a request whose first token is expected after it is due."""
        left_s = self._due_s(request) - now
        if left_s < 0:
            return Refusal("its first token is overdue", inf)
        num_queued = self._outstanding.num_queued_tokens
        num_tokens = num_queued // len(replicas) + request.prompt.num_tokens
        late_s = self._estimates.estimate_s(FLEET, num_tokens) * self.safety - left_s
        if num_queued and late_s > 0:  # by then the queue is short enough for a retry
            return Refusal("its first token would be too late", late_s / self.safety)
        self._outstanding.admit(request)
        self._estimates.sent(request, FLEET, num_tokens, now)
        return None

    def on_first_token(self, request: Request, now: float) -> None:
        """Updates the measured rate of the fleet."""
        self._outstanding.first_token(request)
        self._estimates.first_token(request, now)

    def on_end(self, request: Request, now: float) -> None:
        """Forgets a request that has ended."""
        self._outstanding.end(request)
        self._estimates.ended(request)

    def _due_s(self, request: Request) -> float:
        """Time at which its first token is due, in seconds."""
        if request.deadline_s is None:
            return request.arrival_s + by_priority(self.ttft_s, request)
        return request.deadline_s - (request.max_tokens or 0) * self.tpot_s
