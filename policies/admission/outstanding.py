"""Counts of outstanding requests of a service, updated call by call: sums over a fleet without a loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.core.request import Request


@dataclass(slots=True)
class Outstanding:
    """Counts of requests that were admitted and have not ended; the same quantities as in `ReplicaView`."""

    num_requests: int = 0
    num_tokens: int = 0
    """Prompt tokens of the outstanding requests."""
    num_queued_tokens: int = 0
    """Prompt tokens of the outstanding requests that have produced no output token yet."""
    _queued: set[int] = field(default_factory=set)

    def admit(self, request: Request) -> None:
        """Counts an admitted request."""
        self.num_requests += 1
        self.num_tokens += request.prompt.num_tokens
        self.num_queued_tokens += request.prompt.num_tokens
        self._queued.add(request.request_id)

    def first_token(self, request: Request) -> None:
        """Counts a request with a first token as no longer queued."""
        self._queued.remove(request.request_id)
        self.num_queued_tokens -= request.prompt.num_tokens

    def end(self, request: Request) -> None:
        """Removes a request that has ended, perhaps without a token."""
        self.num_requests -= 1
        self.num_tokens -= request.prompt.num_tokens
        if request.request_id in self._queued:
            self.first_token(request)
