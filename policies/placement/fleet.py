"""The GPUs of a fleet and the replicas on each, for greedy placements."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from policies.placement import Hosting, Plan, Pool, Problem, Unit
from policies.placement.program import plan_of
from policies.placement.units import unit


@dataclass(slots=True)
class Slot:
    """One GPU and its replicas."""

    pool: Pool
    node: int
    hostings: list[Hosting] = field(default_factory=list)

    @property
    def left_bytes(self) -> float:
        return self.pool.memory_bytes - sum(hosting.bytes_each for hosting in self.hostings)


class Fleet:
    """The GPUs of a problem, in the order of its pools; empty at first."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.slots = [
            Slot(pool, node)
            for pool in problem.pools
            for node, size in enumerate(pool.nodes)
            for _ in range(size)
        ]
        self._groups: list[list[Slot]] = []  # GPU groups of replicas over several GPUs

    def places(self, hosting: Hosting) -> Iterator[list[Slot]]:
        """Places with room for the replica: one GPU, or adjacent empty GPUs of one node."""
        mine = [slot for slot in self.slots if slot.pool.name == hosting.pool]
        if hosting.num_gpus == 1:
            for slot in mine:
                is_wide = any(other.num_gpus > 1 for other in slot.hostings)
                has_place = len(slot.hostings) < self.problem.max_models_per_gpu
                if has_place and not is_wide and slot.left_bytes >= hosting.bytes_each:
                    yield [slot]
            return
        for node in sorted({slot.node for slot in mine}):
            empty = [slot for slot in mine if slot.node == node and not slot.hostings]
            if len(empty) >= hosting.num_gpus and empty[0].left_bytes >= hosting.bytes_each:
                yield empty[: hosting.num_gpus]

    def put(self, hosting: Hosting, slots: list[Slot]) -> None:
        for slot in slots:
            slot.hostings.append(hosting)
        if len(slots) > 1:
            self._groups.append(slots)

    def take(self, hosting: Hosting, slots: list[Slot]) -> None:
        """Removes a replica from its GPUs; the reverse of `put`."""
        for slot in slots:
            slot.hostings.remove(hosting)
        if len(slots) > 1:
            self._groups.remove(slots)

    def plan(self) -> Plan:
        """The placement and what it serves."""
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
