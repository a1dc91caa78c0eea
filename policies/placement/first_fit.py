"""First fit decreasing (Johnson, 1973): the largest model first, on the first GPU with enough free memory."""

from __future__ import annotations

from dataclasses import dataclass

from policies.placement import Plan, Problem
from policies.placement.greedy import by_size, fill


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstFitDecreasing:
    """First fit over the pools in the given order; one replica of each model in turn."""

    def place(self, problem: Problem) -> Plan:
        """Returns a placement. Raises ValueError if the objective is cost and it leaves demand unmet."""
        return fill(problem, by_size(problem), lambda hosting, candidates: candidates[0])
