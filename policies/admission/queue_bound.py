"""Queue bound: the outstanding load is limited, and requests beyond the limit are shed at once.

A queue without a bound grows under overload until every answer is too late. A bounded one keeps the wait
below bound / throughput, and other requests are refused immediately. Triton's max_queue_size bounds each
server, Ray Serve's max_queued_requests what waits at each router.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.admission import Refusal, check_choice, check_retry_after
from policies.admission.outstanding import Outstanding
from policies.core.request import Request
from policies.routing import ReplicaView

COUNTS = {
    "requests": ("num_requests", "num_outstanding"),
    "tokens": ("num_tokens", "num_outstanding_tokens"),
    "queued_tokens": ("num_queued_tokens", "num_queued_tokens"),
}
"""Quantities that may be bounded: the attribute of `Outstanding`, and that of `ReplicaView`."""


@dataclass(kw_only=True, slots=True)
class QueueBound:
    """Refuses requests while the bound is reached.

    Tokens may exceed the bound by one prompt at most; a request that is alone is always admitted.

    Per replica, one replica with room is enough. Replicas are checked from the one that had room last, so all
    of them are checked only while none has room.
    """

    max_outstanding: int = 256
    """Load at which requests are refused."""
    count: str = "requests"
    """What is counted: requests, tokens of their prompts, or queued_tokens: prompts without a first token."""
    per: str = "replica"
    """Scope of the bound: replica, or fleet (all replicas together)."""
    retry_after_s: float | None = None
    """Retry-After in seconds that clients get; null: none."""
    _outstanding: Outstanding = field(init=False, default_factory=Outstanding, repr=False, compare=False)
    _place: int = field(init=False, default=0, repr=False, compare=False)  # that had room

    def __post_init__(self) -> None:
        if self.max_outstanding < 1:
            raise ValueError(f"max_outstanding={self.max_outstanding}: must be >= 1")

        check_choice("count", self.count, tuple(COUNTS))
        check_choice("per", self.per, ("replica", "fleet"))
        check_retry_after(self.retry_after_s)

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """Refuses a request while the bound is reached."""
        if not (self._replica_has_room(replicas) if self.per == "replica" else self._fleet_has_room()):
            return Refusal(f"queue bound of the {self.per}", self.retry_after_s)
        self._outstanding.admit(request)
        return None

    def on_first_token(self, request: Request, now: float) -> None:
        """Counts the request as no longer queued."""
        self._outstanding.first_token(request)

    def on_end(self, request: Request, now: float) -> None:
        """Removes the request from the counts."""
        self._outstanding.end(request)

    def _fleet_has_room(self) -> bool:
        num: int = getattr(self._outstanding, COUNTS[self.count][0])
        return num < self.max_outstanding

    def _replica_has_room(self, replicas: Sequence[ReplicaView]) -> bool:
        num_replicas, name = len(replicas), COUNTS[self.count][1]
        for step in range(num_replicas):
            place = (self._place + step) % num_replicas
            if getattr(replicas[place], name) < self.max_outstanding:
                self._place = place
                return True
        return False
