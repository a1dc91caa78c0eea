"""A request on its way through the gateway."""

from __future__ import annotations

from policies.core.limits import StopAfter
from sim.engine.replica import Replica
from sim.workload.base import Arrival


class Visit:
    """A request under way: where it is, and how often its client has sent it."""

    __slots__ = (
        "arrival",
        "attempt",
        "goes_on",
        "has_token",
        "held_since_s",
        "is_given_up",
        "is_let_in",
        "is_routed",
        "is_timed_out",
        "num_resends",
        "num_sends",
        "replica",
    )

    def __init__(self, arrival: Arrival, now: float) -> None:
        self.arrival = arrival
        self.attempt = 0
        self.replica: Replica | None = None
        self.is_routed = False  # the router waits for its end on the replica that it chose
        self.held_since_s = now  # while no replica has it
        self.num_resends = 0
        self.num_sends = 0  # times that the router has chosen a replica for it
        self.goes_on = False  # behind what a replica that crashed had got
        self.is_let_in = False
        self.has_token = False  # this attempt, from whichever replica
        # Its client has left, its replica was told to drop it; after a timeout it may be sent again.
        self.is_timed_out = self.is_given_up = False

    @property
    def has_left(self) -> bool:
        """Whether its client waits no more."""
        return self.is_given_up or self.is_timed_out

    @property
    def stop_after(self) -> StopAfter:
        """The truth about the request: output tokens after which it ends."""
        return self.arrival.sample_tokens or self.arrival.num_output_tokens
