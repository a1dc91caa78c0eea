"""An admission policy: whether a request is let in at all. Say here what it does, and after which paper.

It sees: the request (arrival, prompt, max_tokens, priority, tenant, deadline), before a replica is chosen;
and of each replica that takes requests what ReplicaView has: what was sent there and has not ended; with
reads_signals: ClassVar[bool] = True, what the engine says of itself; with reads_caches, what is cached there.
It never sees how long an answer will be.
It may: refuse, with a reason and the time after which to come again (None: unknown, inf: never); remember
what it let in; have on_first_token, on_end (policies.admission.Admission).
It must promise: to let in whoever comes to an idle service, or to tell it never to come again; to mean what
it says; to forget who has ended; no random numbers but those drawn from (seed, request id), no clock but now.

Memory pressure: not its business. Horizon: it decides once for each attempt of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from policies.admission import Refusal
from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(kw_only=True, slots=True)
class MyPolicy:
    """While much is outstanding, only requests of priority 0 are let in."""

    # Settings are the fields, with their defaults. What a policy remembers is a field, too, with init=False.
    max_outstanding: int = 64
    """Requests that have not ended from which on others are refused."""
    _num_outstanding: int = field(init=False, default=0, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.max_outstanding < 1:
            raise ValueError(f"max_outstanding={self.max_outstanding}: must be >= 1 request")

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """None: it is let in."""
        if request.priority > 0 and self._num_outstanding >= self.max_outstanding:
            return Refusal("room for priority 0 only")
        self._num_outstanding += 1
        return None

    def on_end(self, request: Request, now: float) -> None:
        """One that was let in is gone."""
        self._num_outstanding -= 1
