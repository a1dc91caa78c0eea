"""Routing policy: decides which replica serves a request. Describe it here; name the paper.

It sees: the request (arrival, prompt, priority, tenant, session) and a ReplicaView of each replica: the
requests that were sent there and have not ended, at this instant; with reads_signals: ClassVar[bool] = True,
the engine's own signals (running, waiting, free KV), up to `signal_age_s` old; with reads_caches, the cached
tokens of the prompt.
It never sees output lengths.
It may: remember its choices; define check, on_first_token and on_end (policies.routing.Routing).
It must promise: the index of a replica for every request, and equal states give equal decisions: no random
numbers other than those drawn from (seed, request id), no clock other than `now`.

Memory pressure: none. Horizon: it decides once per request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Checked, NonNegativeInt, Unit
from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(frozen=True, kw_only=True, slots=True)
class MyPolicy(Checked):
    """A session stays on its replica, where its KV may be cached, unless that replica is overloaded."""

    # Settings are the fields, with their defaults. State of the policy is a field, too:
    # field(init=False, default_factory=dict, repr=False, compare=False).
    max_lead: Annotated[NonNegativeInt, Unit("requests")] = 8
    """Requests that a session's replica may have more than the least loaded one."""

    def choose(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> int:
        """Returns the index of the replica that serves the request."""
        counts = [replica.num_outstanding for replica in replicas]
        if request.session_id is not None:
            home = request.session_id % len(replicas)
            if counts[home] - min(counts) <= self.max_lead:
                return home
        return counts.index(min(counts))
