"""What a router expects as TTFT on each replica: tokens in front over a measured rate.

    estimate = (prompt tokens sent there without a first token yet + this prompt's) / rate of that replica

When a first token comes, the tokens that were in front of it and its own, over the time it took, are a new
measurement of the rate; old ones count less and less. Before the first one, initial_tokens_per_s holds. What
a cache saves and what running sequences cost is in the rate, on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from policies.core.request import Request
from policies.routing import ReplicaView

SMOOTHING = 0.1
"""Weight of a new measurement."""


class TtftEstimates:
    """Rates by replica's index, or of whatever else serves, and what is awaited, by request id."""

    def __init__(self, initial_tokens_per_s: float) -> None:
        self._initial_tokens_per_s = initial_tokens_per_s
        self._tokens_per_s: dict[int, float] = {}
        self._awaited: dict[int, tuple[int, int, float]] = {}  # replica, tokens up to its own, sent when

    def estimate_s(self, index: int, num_tokens: int) -> float:
        """TTFT with num_tokens tokens in the queue of a replica, the prompt among them."""
        return num_tokens / self._tokens_per_s.get(index, self._initial_tokens_per_s)

    def of_each(self, request: Request, replicas: Sequence[ReplicaView]) -> list[float]:
        """A request's TTFT on each replica."""
        num_own, estimate_s = request.prompt.num_tokens, self.estimate_s
        return [estimate_s(replica.index, replica.num_queued_tokens + num_own) for replica in replicas]

    def sent(self, request: Request, index: int, num_tokens: int, now: float) -> None:
        """A request was sent to a replica; num_tokens as for its estimate."""
        self._awaited[request.request_id] = index, num_tokens, now

    def sent_to(self, request: Request, replica: ReplicaView, now: float) -> None:
        """The same, before the replica has it."""
        num_tokens = replica.num_queued_tokens + request.prompt.num_tokens
        self.sent(request, replica.index, num_tokens, now)

    def first_token(self, request: Request, now: float) -> None:
        """A request's first token came: learn from it."""
        index, num_tokens, sent_s = self._awaited.pop(request.request_id)
        if now > sent_s:
            measured = num_tokens / (now - sent_s)
            known = self._tokens_per_s.get(index, measured)
            self._tokens_per_s[index] = known + SMOOTHING * (measured - known)

    def ended(self, request: Request) -> None:
        """A request is awaited no more, perhaps without a token."""
        self._awaited.pop(request.request_id, None)


def check_target(ttft_s: float, initial_tokens_per_s: float) -> None:
    """Raise ValueError for settings that mean nothing."""
    if not 0 < ttft_s < inf:
        raise ValueError(f"ttft_s={ttft_s}: must be a finite number > 0 s")
    if not 0 < initial_tokens_per_s < inf:
        raise ValueError(
            f"initial_tokens_per_s={initial_tokens_per_s}: must be a finite number > 0 tokens per second"
        )
