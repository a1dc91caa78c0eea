"""What a service has let in and not got rid of, counted call by call: sums over a fleet without a walk."""

from __future__ import annotations

from dataclasses import dataclass, field

from policies.core.request import Request


@dataclass(slots=True)
class Outstanding:
    """Counts of requests that were let in and have not ended; the same quantities as a `ReplicaView` has."""

    num_requests: int = 0
    num_tokens: int = 0
    """Prompt tokens of those."""
    num_queued_tokens: int = 0
    """Prompt tokens of those that have no token of their answer yet."""
    _queued: set[int] = field(default_factory=set)

    def admit(self, request: Request) -> None:
        """A request is let in."""
        self.num_requests += 1
        self.num_tokens += request.prompt.num_tokens
        self.num_queued_tokens += request.prompt.num_tokens
        self._queued.add(request.request_id)

    def first_token(self, request: Request) -> None:
        """It waits no more."""
        self._queued.remove(request.request_id)
        self.num_queued_tokens -= request.prompt.num_tokens

    def end(self, request: Request) -> None:
        """It is gone, perhaps without a token."""
        self.num_requests -= 1
        self.num_tokens -= request.prompt.num_tokens
        if request.request_id in self._queued:
            self.first_token(request)
