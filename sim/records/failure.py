"""The kinds of failures of a replica, and one failure of a run."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class FailureKind(Enum):
    """The kind of a replica's failure."""

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
        return self in (FailureKind.straggler, FailureKind.link_slow)


class Failure(NamedTuple):
    """One failure of a replica, from at_s for duration_s, in seconds. Sorted by time, replica, event."""

    at_s: float
    replica: int
    event: int  # place in the settings
    kind: FailureKind
    duration_s: float
    factor: float = 1.0  # times as long as without it
