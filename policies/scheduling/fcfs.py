"""First come, first served; the last one is preempted first (vLLM's `--scheduling-policy fcfs`, default).

Memory pressure: the sequence that was admitted last is preempted. It is the last arrival, but where a request
was skipped that waited for its adapter or for a larger budget. Horizon: the order never changes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.core.sequence import SequenceView
from policies.scheduling import Scheduling


@dataclass(frozen=True, kw_only=True, slots=True)
class Fcfs(Scheduling):
    """Order of arrival. A preempted request keeps its position before all later arrivals."""

    preempts_newest: ClassVar[bool] = True
    starvation_bound: ClassVar[int | None] = 0

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """Returns the sort key: (arrival,)."""
        return (seq.request.arrival_s,)
