"""Earliest deadline first (Liu and Layland, 1973) against the deadline of the first token.

The deadline is arrival plus ttft_s of the request's priority, or the request's own deadline_s if it has one.
The order is optimal on one machine if all deadlines can be met; under overload it serves requests that are
late already before requests that could still be in time. A request is overtaken only by those with an earlier
deadline. As long as deadlines lie behind arrivals, these all come before its own deadline, max(ttft_s) after
its arrival at the latest unless it has a deadline_s; but their number is not bounded.
Memory pressure: the latest deadline is preempted; a sequence past its first token keeps its rank, as losing
its KV would help no other request. Horizon: deadlines are fixed, so the order never changes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.core.request import Request
from policies.core.sequence_view import SequenceView
from policies.scheduling import Scheduling


def check_by_priority(name: str, limits_s: tuple[float, ...]) -> None:
    """Raises ValueError unless a table of times by priority is non-empty and all times are > 0."""
    if not limits_s or not all(limit_s > 0 for limit_s in limits_s):
        raise ValueError(f"{name}={list(limits_s)}: must be times > 0 s, for priorities 0, 1, ...")


def by_priority(limits_s: tuple[float, ...], request: Request) -> float:
    """The time for a request's priority; the last value holds for all beyond, the first for all below 0."""
    return limits_s[min(max(request.priority, 0), len(limits_s) - 1)]


@dataclass(frozen=True, kw_only=True, slots=True)
class EarliestDeadlineFirst(Scheduling):
    """The earliest deadline is admitted first, the latest is preempted first."""

    ttft_s: tuple[float, ...] = (1.0,)
    """TTFT targets in seconds for priority 0, 1, ...; the last holds for all beyond."""

    def __post_init__(self) -> None:
        Scheduling.__post_init__(self)
        object.__setattr__(self, "ttft_s", tuple(self.ttft_s))
        check_by_priority("ttft_s", self.ttft_s)

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Sort key (deadline, arrival)."""
        request = seq.request
        deadline_s = request.deadline_s
        if deadline_s is None:
            deadline_s = request.arrival_s + by_priority(self.ttft_s, request)
        return (deadline_s, request.arrival_s)
