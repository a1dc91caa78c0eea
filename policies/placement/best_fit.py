"""Best fit decreasing (Johnson, 1973): the largest model first, where it leaves the least memory free."""

from __future__ import annotations

from dataclasses import dataclass

from policies.placement import Hosting, Plan, Problem
from policies.placement.fleet import Slot
from policies.placement.greedy import by_size, fill


@dataclass(frozen=True, kw_only=True, slots=True)
class BestFitDecreasing:
    """Best fit over all pools, on as few GPUs as suffice; one replica of each model in turn."""

    def place(self, problem: Problem) -> Plan:
        largest = {pool.name: pool.memory_bytes for pool in problem.pools}
        turns = [
            sorted(turn, key=lambda hosting: (hosting.num_gpus, largest[hosting.pool] - hosting.bytes_each))
            for turn in by_size(problem)
        ]
        return fill(problem, turns, tightest)


def tightest(hosting: Hosting, places: list[list[Slot]]) -> list[Slot]:
    """The places with the least free memory; the first of equals."""
    return min(places, key=lambda slots: sum(slot.left_bytes for slot in slots))
