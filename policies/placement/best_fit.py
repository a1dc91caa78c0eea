"""Best fit decreasing (Johnson, 1973): the largest model first, on the fullest GPU on which it fits."""

from __future__ import annotations

from dataclasses import dataclass

from policies.placement import Hosting, Plan, Problem
from policies.placement.fleet import Slot
from policies.placement.greedy import by_size, fill


@dataclass(frozen=True, kw_only=True, slots=True)
class BestFitDecreasing:
    """Best fit over all pools, on as few GPUs as suffice; one replica of each model in turn."""

    def place(self, problem: Problem) -> Plan:
        """Returns a placement. Raises ValueError if the objective is cost and it leaves demand unmet."""
        largest = {pool.name: pool.memory_bytes for pool in problem.pools}
        turns = [
            sorted(turn, key=lambda hosting: (hosting.num_gpus, largest[hosting.pool] - hosting.bytes_each))
            for turn in by_size(problem)
        ]
        return fill(problem, turns, tightest)


def tightest(hosting: Hosting, candidates: list[list[Slot]]) -> list[Slot]:
    """Returns the GPUs with the least free memory; the first of equals."""
    return min(candidates, key=lambda slots: sum(slot.free_bytes for slot in slots))
