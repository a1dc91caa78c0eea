"""A request on its way through the gateway."""

from __future__ import annotations

from collections.abc import Callable

from policies.core.limits import StopAfter
from policies.core.request import Request
from sim.engine.replica import Replica
from sim.workload.base import Arrival


class Visit:
    """A request under way: where it is, and how often its client has sent it."""

    attempt = 1
    """How often its client has sent it."""
    replica: Replica | None = None
    """The one that has it."""
    on_routed_end: Callable[[Request, float], None] | None = None
    """Tells the router, if it waits for that, of the request's end on the replica that it chose."""
    num_resends = 0
    """Times that the service has sent it again, in this attempt."""
    goes_on = False
    """Whether it goes on behind what a replica that crashed had got."""
    is_let_in = False
    """Whether an admission policy has let it in."""
    has_token = False
    """Whether this attempt has a token, from whichever replica; noted where that matters to anybody."""
    is_timed_out = is_given_up = False
    """Whether its client has left and its replica was told to drop it; after a timeout it may come again."""

    def __init__(self, arrival: Arrival, now: float) -> None:
        self.arrival = arrival
        self.stop_after: StopAfter = arrival.sample_tokens or arrival.num_output_tokens
        """The truth about the request: output tokens after which it ends."""
        self.came_s = self.held_since_s = now
        """When it came first, and since when no replica has had it, while none has it."""

    def come_again(self) -> None:
        """Its client sends it once more."""
        self.attempt += 1
        self.num_resends = 0
        self.has_token = self.is_timed_out = self.goes_on = False

    @property
    def has_left(self) -> bool:
        """Whether its client waits no more."""
        return self.is_given_up or self.is_timed_out
