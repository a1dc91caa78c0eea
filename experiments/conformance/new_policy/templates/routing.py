"""A routing policy: which replica gets a request. Say here what it does, and after which paper.

It sees: the request (arrival, prompt, priority, tenant, session) and of each replica what ReplicaView has:
what was sent there and has not ended, at this instant; with reads_signals: ClassVar[bool] = True, what the
engine says of itself (running, waiting, free KV), as old as `signal_age_s`; with reads_caches, how much of a
prompt is cached there.
It never sees how long an answer will be.
It may: choose, and remember what it chose; have check, on_first_token, on_end (policies.routing.Routing).
It must promise: the index of a replica, for every request, and the same one when asked the same again: no
random numbers but those drawn from (seed, request id), no clock but `now`.

Memory pressure: not its business. Horizon: it decides once a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class MyPolicy:
    """A session stays on its replica, where its KV may be, unless that has too much to do."""

    # Settings are the fields, with their defaults. What a policy remembers is a field, too:
    # field(init=False, default_factory=dict, repr=False, compare=False).
    max_lead: int = 8
    """Requests by which a session's replica may be ahead of the least loaded one."""

    def __post_init__(self) -> None:
        if self.max_lead < 0:
            raise ValueError(f"max_lead={self.max_lead}: must be >= 0 requests")

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Index of the replica that gets the request."""
        counts = [replica.num_outstanding for replica in replicas]
        if request.session_id is not None:
            home = request.session_id % len(replicas)
            if counts[home] - min(counts) <= self.max_lead:
                return home
        return counts.index(min(counts))
