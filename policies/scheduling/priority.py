"""Priority classes (vLLM's `--scheduling-policy priority`), strict or with aging.

Strict: first come, first served within a class; requests may starve if classes before theirs keep the engine
busy. With aging a request moves up one class for every aging_s seconds that it waits, as in schedulers of
operating systems. All move up at the same rate, so the order of two requests never changes and is that of
priority x aging_s + arrival: no request waits for requests that arrive more than aging_s per class after it.
Memory pressure: the running sequence of largest rank is preempted. Horizon: the order never changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from fieldlimits import Gt, Unit
from policies.core.sequence import SequenceView
from policies.scheduling import Scheduling


@dataclass(frozen=True, kw_only=True, slots=True)
class Priority(Scheduling):
    """The smallest `Request.priority` is admitted first, the largest is preempted first."""

    has_classes: ClassVar[bool] = True

    aging_s: Annotated[float | None, Gt(0), Unit("s"), "null for strict classes"] = None
    """Waiting time in seconds that is worth one class; null: no aging."""

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (priority, arrival), or with aging their weighted sum."""
        request = seq.request
        if self.aging_s is None:
            return (request.priority, request.arrival_s)
        return (request.priority * self.aging_s + request.arrival_s,)
