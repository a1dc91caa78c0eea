"""First come, first served; the last come is preempted first (vLLM's default, `--scheduling-policy fcfs`).

Memory pressure: the last come goes. Horizon: the order never changes by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from policies.core.sequence_view import SequenceView
from policies.scheduling import Scheduling


@dataclass(frozen=True, kw_only=True, slots=True)
class Fcfs(Scheduling):
    """Order of arrival. A preempted request keeps its place: ahead of all that came later."""

    starvation_bound: ClassVar[int | None] = 0

    def rank(self, seq: SequenceView) -> tuple[float, ...]:
        """(arrival,)."""
        return (seq.request.arrival_s,)
