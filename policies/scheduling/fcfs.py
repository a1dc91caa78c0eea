"""First come, first served; the last come is preempted first (vLLM's default, `--scheduling-policy fcfs`)."""

from __future__ import annotations

from dataclasses import dataclass

from policies.request import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class Fcfs:
    """Order of arrival. A preempted request keeps its place: ahead of all that came later."""

    def rank(self, request: Request) -> tuple[float, ...]:
        """(arrival,)."""
        return (request.arrival_s,)
