"""The current attempt of a request: its state at the gateway."""

from __future__ import annotations

from collections.abc import Callable

from policies.core.limits import StopAfter
from policies.core.request import Request
from sim.engine.replica import Replica
from sim.workload.base import Arrival


class RequestAttempt:
    """The state of a request in progress: the replica that has it, and the number of the current attempt.

    An attempt begins when the client sends the request. One object serves all attempts of a request.
    """

    number = 1
    """Number of the attempt: 1 for the first, 2 for the first retry."""
    replica: Replica | None = None
    """The replica that has the request; None: it is held at the gateway, or its client waits to retry."""
    on_routed_end: Callable[[Request, float], None] | None = None
    """Notifies the router that the request has ended on the chosen replica; None: it has no such hook."""
    num_resends = 0
    """Number of times that the gateway has resent the request in this attempt, after crashes."""
    is_resumed = False
    """Whether the request continues after the tokens that a crashed replica has produced."""
    is_admitted = False
    """Whether the admission policy has admitted this attempt."""
    has_token = False
    """Whether this attempt has its first token, from any replica; set only if a policy or client needs it."""
    is_timed_out = is_given_up = False
    """Whether the attempt is being aborted: timed out, after which the client may retry, or given up."""

    def __init__(self, arrival: Arrival, now: float) -> None:
        self.arrival = arrival
        self.stop_after: StopAfter = arrival.sample_tokens or arrival.num_output_tokens
        """Output tokens after which the request ends; policies do not see it."""
        self.first_arrival_s = self.held_since_s = now
        """Time of the first attempt in seconds, and the time since which no replica has had the request."""

    def begin_retry(self) -> None:
        """Begins the next attempt, a retry of the client."""
        self.number += 1
        self.num_resends = 0
        self.has_token = self.is_timed_out = self.is_resumed = False

    @property
    def has_left(self) -> bool:
        """True if the client has given up or timed out."""
        return self.is_given_up or self.is_timed_out
