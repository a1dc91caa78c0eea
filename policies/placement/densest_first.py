"""Densest first: the model with the most value per byte of memory first (Dantzig, 1957, for knapsacks)."""

from __future__ import annotations

from dataclasses import dataclass

from policies.placement import Objective, Plan, Problem
from policies.placement.best_fit import tightest
from policies.placement.greedy import fill


@dataclass(frozen=True, kw_only=True, slots=True)
class DensestFirst:
    """Adds replicas of the densest model while they serve more, then of the next densest.

    For objective cost, density is the share of the demand served per $ of rent.
    """

    def place(self, problem: Problem) -> Plan:
        """Returns a placement. Raises ValueError if the objective is cost and it leaves demand unmet."""
        values = {d.model: d.value for d in problem.demands}
        shares = {d.model: 1 / d.rate for d in problem.demands if d.rate}
        pools = {pool.name: pool for pool in problem.pools}

        def density(index: int) -> float:
            hosting = problem.hostings[index]
            pool = pools[hosting.pool]
            rate = hosting.rate(pool.memory_bytes)
            if problem.objective is Objective.cost:
                rent = hosting.num_gpus * pool.usd_per_hour
                return rate * shares.get(hosting.model, 0.0) / max(rent, 1e-12)
            return rate * values.get(hosting.model, 0.0) / (hosting.bytes_each * hosting.num_gpus)

        order = sorted(range(len(problem.hostings)), key=lambda index: (-density(index), index))
        return fill(problem, [[problem.hostings[index] for index in order]], tightest)
