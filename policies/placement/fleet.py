"""The GPUs of a fleet and the replicas on each of them, for greedy placements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from policies.placement import Hosting, Plan, Pool, Problem, Unit
from policies.placement.milp import plan_of, unit


@dataclass(slots=True)
class Slot:
    """One GPU and its replicas."""

    pool: Pool
    node: int
    hostings: list[Hosting] = field(default_factory=list)

    @property
    def free_bytes(self) -> float:
        """Free memory in bytes."""
        return self.pool.memory_bytes - sum(hosting.bytes_each for hosting in self.hostings)


class Fleet:
    """The GPUs of a problem, in the order of its pools, at first without replicas."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.slots = [
            Slot(pool, node)
            for pool in problem.pools
            for node, size in enumerate(pool.nodes)
            for _ in range(size)
        ]
        self._groups: list[list[Slot]] = []  # the GPUs of each replica on several GPUs

    def candidates(self, hosting: Hosting) -> Iterator[list[Slot]]:
        """Yields GPUs on which the replica fits: a single GPU, or empty GPUs of one node."""
        own_pool = [slot for slot in self.slots if slot.pool.name == hosting.pool]
        if hosting.num_gpus == 1:
            for slot in own_pool:
                is_in_group = any(other.num_gpus > 1 for other in slot.hostings)
                may_add = len(slot.hostings) < self.problem.max_models_per_gpu
                if may_add and not is_in_group and slot.free_bytes >= hosting.bytes_each:
                    yield [slot]
            return
        for node in sorted({slot.node for slot in own_pool}):
            empty = [slot for slot in own_pool if slot.node == node and not slot.hostings]
            if len(empty) >= hosting.num_gpus and empty[0].free_bytes >= hosting.bytes_each:
                yield empty[: hosting.num_gpus]

    def add(self, hosting: Hosting, slots: list[Slot]) -> None:
        """Adds a replica to the GPUs."""
        for slot in slots:
            slot.hostings.append(hosting)
        if len(slots) > 1:
            self._groups.append(slots)

    def remove(self, hosting: Hosting, slots: list[Slot]) -> None:
        """Removes a replica from its GPUs."""
        for slot in slots:
            slot.hostings.remove(hosting)
        if len(slots) > 1:
            self._groups.remove(slots)

    def plan(self) -> Plan:
        """Returns the placement and the rates that it serves."""
        return plan_of(self.problem, list(self._units()))

    def _units(self) -> Iterator[Unit]:
        for slots in self._groups:
            yield self._unit(slots[0])
        for slot in self.slots:
            if slot.hostings and slot.hostings[0].num_gpus == 1:
                yield self._unit(slot)

    def _unit(self, slot: Slot) -> Unit:
        found = unit(self.problem, slot.pool, slot.hostings)
        assert found is not None
        return found
