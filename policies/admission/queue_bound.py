"""Queue bound: the outstanding load is limited, and requests beyond the limit are refused at once.

Without a bound the queue grows under overload until every request misses its SLO. With a bound the waiting
time stays below bound / throughput. Triton's max_queue_size bounds the queue of each server, Ray Serve's
max_queued_requests that of each router.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fieldlimits import Checked, NonNegative, OneOf, PositiveInt, Unit
from policies.admission import Refusal
from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(slots=True)
class Outstanding:
    """Counts of admitted requests that have not ended; the quantities of `ReplicaView`, summed."""

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
        """Removes a request that has ended, possibly before its first token."""
        self.num_requests -= 1
        self.num_tokens -= request.prompt.num_tokens
        if request.request_id in self._queued:
            self.first_token(request)


COUNTS = {
    "requests": ("num_requests", "num_outstanding"),
    "tokens": ("num_tokens", "num_outstanding_tokens"),
    "queued_tokens": ("num_queued_tokens", "num_queued_tokens"),
}
"""Allowed values of `count`, each with its attributes in `Outstanding` and `ReplicaView`."""


@dataclass(kw_only=True, slots=True)
class QueueBound(Checked):
    """Refuses requests while the outstanding load has reached the bound.

    Tokens may exceed the bound by at most one prompt; a request to an idle service is always admitted. With
    per=replica, one replica below the bound is enough. The check starts at the last replica found below the
    bound, so all replicas are checked only if all have reached it.
    """

    max_outstanding: PositiveInt = 256
    """Load at which requests are refused, in the unit of `count`."""
    count: Annotated[str, OneOf(COUNTS)] = "requests"
    """Counted quantity: requests, tokens (of prompts), or queued_tokens (before the first token)."""
    per: Annotated[str, OneOf(("replica", "fleet"))] = "replica"
    """Scope of the bound: replica, or fleet (all replicas together)."""
    retry_after_s: Annotated[NonNegative | None, Unit("s"), "null for none"] = None
    """Retry-After in seconds sent to clients; null: none."""
    _outstanding: Outstanding = field(init=False, default_factory=Outstanding, repr=False, compare=False)
    _position: int = field(init=False, default=0, repr=False, compare=False)  # of that last replica

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """Refuses a request while the bound is reached."""
        if not (self._has_free_replica(replicas) if self.per == "replica" else self._is_fleet_free()):
            return Refusal(f"queue bound of the {self.per}", self.retry_after_s)
        self._outstanding.admit(request)
        return None

    def on_first_token(self, request: Request, now: float) -> None:
        """Counts the request as no longer queued."""
        self._outstanding.first_token(request)

    def on_end(self, request: Request, now: float) -> None:
        """Removes the request from the counts."""
        self._outstanding.end(request)

    def _is_fleet_free(self) -> bool:
        num: int = getattr(self._outstanding, COUNTS[self.count][0])
        return num < self.max_outstanding

    def _has_free_replica(self, replicas: Sequence[ReplicaView]) -> bool:
        num_replicas, name = len(replicas), COUNTS[self.count][1]
        for step in range(num_replicas):
            position = (self._position + step) % num_replicas
            if getattr(replicas[position], name) < self.max_outstanding:
                self._position = position
                return True
        return False
