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
from policies.admission.outstanding import Outstanding
from policies.core.request import Request
from policies.routing import ReplicaView

COUNTS = {
    "requests": ("num_requests", "num_outstanding"),
    "tokens": ("num_tokens", "num_outstanding_tokens"),
    "queued_tokens": ("num_queued_tokens", "num_queued_tokens"),
}
"""Allowed values of `count`; each with the attribute of `Outstanding` and that of `ReplicaView`."""


@dataclass(kw_only=True, slots=True)
class QueueBound(Checked):
    """Refuses requests while the outstanding load has reached the bound.

    Tokens may exceed the bound by at most one prompt; the only request of a service is always admitted.

    With per=replica, one replica below the bound is enough. The check starts at the last replica that was
    below the bound, so all replicas are checked only while all have reached it.
    """

    max_outstanding: PositiveInt = 256
    """Load at which requests are refused, in the unit of `count`."""
    count: Annotated[str, OneOf(COUNTS)] = "requests"
    """Counted quantity: requests, tokens (of prompts), or queued_tokens (before the first token)."""
    per: Annotated[str, OneOf(("replica", "fleet"))] = "replica"
    """Scope of the bound: replica, or fleet (all replicas together)."""
    retry_after_s: Annotated[NonNegative | None, Unit("s"), "null for none"] = None
    """Retry-After in seconds that clients get; null: none is sent."""
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
