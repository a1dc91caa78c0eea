"""What can happen to a replica, and one such event of a run."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """What happens to a replica."""

    crash = "crash"
    """Its process or machine is gone, and with it all KV; it serves again after duration_s."""
    straggler = "straggler"
    """Its iterations take `factor` times as long: a hot or throttled GPU."""
    link_down = "link_down"
    """Nothing gets to it or from it; it goes on with what it has."""
    link_slow = "link_slow"
    """Transfers take `factor` times as long."""
    host_out_of_memory = "host_out_of_memory"
    """The host's memory is full: what is kept there is lost, and the process with it, as in a crash."""

    @property
    def has_factor(self) -> bool:
        return self in (Kind.straggler, Kind.link_slow)


class Trouble(NamedTuple):
    """One replica's trouble, from at_s for duration_s. Sorted by time, replica, event."""

    at_s: float
    replica: int
    event: int  # place in the settings
    kind: Kind
    duration_s: float
    factor: float = 1.0  # times as long as without it
