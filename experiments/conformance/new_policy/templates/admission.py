"""Admission policy: decides whether a request is admitted. Describe it here; name the paper.

It sees: the request (arrival, prompt, max_tokens, priority, tenant, deadline), before a replica is chosen,
and a ReplicaView of each replica: the requests that were sent there and have not ended; with
reads_signals: ClassVar[bool] = True, the engine's own signals; with reads_caches, the cached prefixes.
It never sees output lengths.
It may: refuse a request, with a reason and the time after which to retry (None: unknown, inf: never);
remember the requests that it admitted; define on_first_token and on_end (policies.admission.Admission).
It must promise: a request to an idle service is admitted or refused permanently; a retry after the time given
is admitted if the service is idle by then; ended requests are forgotten; no random numbers other than those
drawn from (seed, request id), no clock other than `now`.

Memory pressure: none. Horizon: it decides once per attempt of a request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

from fieldlimits import Checked, PositiveInt, Unit
from policies.admission import Refusal
from policies.core.request import Request
from policies.routing import ReplicaView


@dataclass(kw_only=True, slots=True)
class MyPolicy(Checked):
    """Admits only requests of priority 0 while many requests are outstanding."""

    # Settings are the fields, with their defaults. State of the policy is a field with init=False.
    max_outstanding: Annotated[PositiveInt, Unit("request")] = 64
    """Number of outstanding requests from which on requests of other priorities are refused."""
    _num_outstanding: int = field(init=False, default=0, repr=False, compare=False)

    def refusal(self, request: Request, replicas: Sequence[ReplicaView], now: float) -> Refusal | None:
        """Returns None if the request is admitted, otherwise the refusal."""
        if request.priority > 0 and self._num_outstanding >= self.max_outstanding:
            return Refusal("only priority 0 is admitted now")
        self._num_outstanding += 1
        return None

    def on_end(self, request: Request, now: float) -> None:
        """Notes that an admitted request has ended."""
        self._num_outstanding -= 1
