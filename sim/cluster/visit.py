"""A request on its way through the gateway."""

from __future__ import annotations

from policies.core.limits import StopAfter
from sim.engine.replica import Replica
from sim.workload.base import Arrival


class Visit:
    """A request under way: where it is, and how often its client has sent it."""

    attempt = 0
    """How often its client has sent it."""
    replica: Replica | None = None
    """The one that has it."""
    is_routed = False
    """Whether the router waits for its end on the replica that it chose."""
    num_sends = 0
    """Times that the router has chosen a replica for it."""
    num_resends = 0
    """Times that the service has sent it again, in this attempt."""
    goes_on = False
    """Whether it goes on behind what a replica that crashed had got."""
    is_let_in = False
    """Whether admission has let it in."""
    has_token = False
    """Whether this attempt has a token, from whichever replica."""
    is_timed_out = is_given_up = False
    """Whether its client has left and its replica was told to drop it; after a timeout it may come again."""

    def __init__(self, arrival: Arrival, now: float) -> None:
        self.arrival = arrival
        self.held_since_s = now
        """Since when no replica has had it, while none has it."""

    def begin_attempt(self) -> None:
        """Its client sends it, perhaps again."""
        self.attempt += 1
        if self.attempt > 1:
            self.num_resends = 0
            self.has_token = self.is_timed_out = self.goes_on = False

    @property
    def has_left(self) -> bool:
        """Whether its client waits no more."""
        return self.is_given_up or self.is_timed_out

    @property
    def stop_after(self) -> StopAfter:
        """The truth about the request: output tokens after which it ends."""
        return self.arrival.sample_tokens or self.arrival.num_output_tokens
