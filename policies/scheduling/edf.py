"""Earliest deadline first (Liu and Layland, 1973) against the deadline of the first token.

The deadline is arrival plus ttft_s of the request's priority, or the request's own deadline_s if it has one.
The order is optimal on one machine if all deadlines can be met; under overload it serves requests that are
late before requests that could still be in time. A request is overtaken only by requests with an earlier
deadline. These arrive before its own deadline, which is at most max(ttft_s) after its arrival unless it has a
deadline_s; but their number is not limited.
Memory pressure: the latest deadline is preempted; a sequence keeps its rank after its first token. Horizon:
deadlines are fixed, so the order never changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fieldlimits import Gt, MinLen, Unit
from policies.core.request import Request
from policies.core.sequence import SequenceView
from policies.scheduling import Scheduling

TimesByPriority = Annotated[tuple[Annotated[float, Gt(0), Unit("s")], ...], MinLen(1)]
"""Times in seconds for priority 0, 1, ...; the last one applies to all further priorities."""


def by_priority(limits_s: tuple[float, ...], request: Request) -> float:
    """Returns the time for a request's priority; priorities beyond the table have the nearest value."""
    return limits_s[min(max(request.priority, 0), len(limits_s) - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class EarliestDeadlineFirst(Scheduling):
    """The earliest deadline is admitted first, the latest is preempted first."""

    ttft_s: TimesByPriority = (1.0,)
    """TTFT targets in seconds for priority 0, 1, ...; the last one applies to all further priorities."""

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        object.__setattr__(self, "ttft_s", tuple(self.ttft_s))

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (deadline, arrival)."""
        request = seq.request
        deadline_s = request.deadline_s
        if deadline_s is None:
            deadline_s = request.arrival_s + by_priority(self.ttft_s, request)
        return (deadline_s, request.arrival_s)
