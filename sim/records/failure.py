"""The kinds of failures of a replica, and one failure of a run."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class FailureKind(Enum):
    """The kind of a failure of a replica."""

    crash = "crash"
    """Its process or machine fails, with the loss of all KV; it serves again after duration_s."""
    straggler = "straggler"
    """Its iterations take `factor` times as long: a hot or throttled GPU."""
    link_down = "link_down"
    """Its link is lost; it continues the requests that it has."""
    link_slow = "link_slow"
    """Its transfers take `factor` times as long."""
    host_out_of_memory = "host_out_of_memory"
    """Its host runs out of memory: the content of host memory and the process are lost, as in a crash."""

    @property
    def has_factor(self) -> bool:
        return self in (FailureKind.straggler, FailureKind.link_slow)


class Failure(NamedTuple):
    """One failure of a replica, from at_s for duration_s, in seconds. Sorted by time, replica, event."""

    at_s: float
    replica: int
    event: int  # index of the event in the settings
    kind: FailureKind
    duration_s: float
    factor: float = 1.0  # on durations
