"""Counts of a service's outstanding requests, updated with every request, without a loop over replicas."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.core.request import Request


@dataclass(slots=True)
class Outstanding:
    """Counts of requests that were admitted and have not ended; the quantities of `ReplicaView`, summed."""

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
        """Counts a request as no longer queued, because it has its first token."""
        self._queued.remove(request.request_id)
        self.num_queued_tokens -= request.prompt.num_tokens

    def end(self, request: Request) -> None:
        """Removes a request that has ended, perhaps before its first token."""
        self.num_requests -= 1
        self.num_tokens -= request.prompt.num_tokens
        if request.request_id in self._queued:
            self.first_token(request)
