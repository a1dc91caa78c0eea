"""Priority classes (vLLM's `--scheduling-policy priority`), strict or with aging.

Strict: first come, first served within a class; requests behind a class that keeps the engine busy may
starve. With aging a request rises by one class for every aging_s that it waits, as in operating systems'
schedulers. All rise at the same pace, so the relative order of two requests never changes and is that of
priority x aging_s + arrival: no request waits for requests that arrive more than aging_s per class after it.
Memory pressure: the largest rank of the running sequences is preempted. Horizon: the order never changes by
itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.core.sequence_view import SequenceView
from policies.scheduling import Scheduling


@dataclass(frozen=True, kw_only=True, slots=True)
class Priority(Scheduling):
    """A smaller `Request.priority` is admitted first; among the running, the largest is preempted first."""

    aging_s: float | None = None
    """Waiting time in seconds that makes up for one class; null: no aging."""

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        if self.aging_s is not None and not self.aging_s > 0:
            raise ValueError(f"aging_s={self.aging_s}: must be > 0 s; null for strict classes")

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Sort key (priority, arrival), or their weighted sum."""
        request = seq.request
        if self.aging_s is None:
            return (request.priority, request.arrival_s)
        return (request.priority * self.aging_s + request.arrival_s,)
