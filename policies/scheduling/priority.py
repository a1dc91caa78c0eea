"""Priority classes (vLLM's `--scheduling-policy priority`), strict or with aging.

Strict: first come, first served within a class; those behind a class that keeps the engine busy may starve.
With aging a request rises by one class for every aging_s that it waits, as in operating systems' schedulers.
All rise at the same pace, so who goes before whom never changes and the order is that of
priority x aging_s + arrival: nobody waits for requests that come more than aging_s a class after it.
Memory pressure: among the running, the largest rank goes. Horizon: the order never changes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.core.sequence_view import SequenceView
from policies.scheduling import Scheduling


@dataclass(frozen=True, kw_only=True, slots=True)
class Priority(Scheduling):
    """A smaller `Request.priority` is admitted first; among the running, the largest is preempted first."""

    aging_s: float | None = None
    """Waiting time that makes up for one class; null: none does."""

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        if self.aging_s is not None and not self.aging_s > 0:
            raise ValueError(f"aging_s={self.aging_s}: must be > 0 s; null for strict classes")

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """(priority, arrival), or their weighted sum."""
        request = seq.request
        if self.aging_s is None:
            return (request.priority, request.arrival_s)
        return (request.priority * self.aging_s + request.arrival_s,)
