"""First fit decreasing (Johnson, 1973): the largest model first, on the first GPU with room."""

from __future__ import annotations

from dataclasses import dataclass

from policies.placement import Plan, Problem
from policies.placement.greedy import by_size, fill


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstFitDecreasing:
    """First fit over pools in the order given; one replica of each model in turn."""

    def place(self, problem: Problem) -> Plan:
        return fill(problem, by_size(problem), lambda hosting, places: places[0])
