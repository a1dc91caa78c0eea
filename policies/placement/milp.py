"""Exact placement by mixed-integer linear programming (HiGHS, through scipy).

Every set of models that fits on one GPU is a column, as in the cutting-stock problem (Gilmore and Gomory,
1961), so that the cost of sharing a GPU can be any function. AlpaServe (OSDI 2023) and Helix (ASPLOS 2025)
also place models on GPUs by such programs. It takes seconds for hundreds of columns and GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from policies.placement import Plan, Problem
from policies.placement.program import plan_of, solve
from policies.placement.units import units_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Milp:
    """Optimal placement; of equal value the cheapest."""

    def place(self, problem: Problem) -> Plan:
        """Returns the best placement. Raises ValueError if the objective is cost and demand cannot be met."""
        units = units_of(problem)
        counts = solve(problem, units)
        if counts is None:
            rates = ", ".join(f"{demand.model} {demand.rate:,.6g}" for demand in problem.demands)
            gpus = ", ".join(f"{pool.count} {pool.name}" for pool in problem.pools)
            raise ValueError(
                f"objective=cost: no placement serves {rates} tokens/s on {gpus}; allow more GPUs"
            )
        return plan_of(
            problem, [unit for unit, count in zip(units, counts, strict=True) for _ in range(count)]
        )
