"""Estimates the TTFT of a request on each replica: the queued prompt tokens divided by a measured rate.

    estimate = (prompt tokens of requests without a first token + this prompt's tokens) / rate of the replica

When a request gets its first token, the tokens of its estimate divided by the time since it was sent are a
new measurement of the rate, which enters an exponential moving average. Until the first measurement the rate
is initial_tokens_per_s. The rate thus includes the average effects of cache hits and of running decodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from policies.core.request import Request
from policies.routing import ReplicaView

SMOOTHING = 0.1
"""Weight of a new measurement in the moving average."""


class TtftEstimates:
    """Measured prefill rates by index of a replica (or other server), and requests without a first token."""

    def __init__(self, initial_tokens_per_s: float) -> None:
        self._initial_tokens_per_s = initial_tokens_per_s
        self._tokens_per_s: dict[int, float] = {}
        self._awaited: dict[int, tuple[int, int, float]] = {}  # replica, tokens in its estimate, time sent

    def estimate_s(self, index: int, num_tokens: int) -> float:
        """Returns the TTFT in seconds with num_tokens queued tokens, the request's prompt included."""
        return num_tokens / self._tokens_per_s.get(index, self._initial_tokens_per_s)

    def all_s(self, request: Request, replicas: Sequence[ReplicaView]) -> list[float]:
        """Returns the estimated TTFT of a request on each replica, in seconds."""
        num_own, estimate_s = request.prompt.num_tokens, self.estimate_s
        return [estimate_s(replica.index, replica.num_queued_tokens + num_own) for replica in replicas]

    def sent(self, request: Request, index: int, num_tokens: int, now: float) -> None:
        """Records that a request was sent to a replica; num_tokens is the one of its estimate."""
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
        """Removes a request that has ended, perhaps before its first token."""
        self._awaited.pop(request.request_id, None)
