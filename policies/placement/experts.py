"""Placement of the experts of a layer on expert-parallel ranks, with copies of popular ones.

A rank has slots, each with one expert. A token that has chosen an expert with several copies goes to one of
them. All ranks wait for the busiest one, so a placement is good if the ranks get equal numbers of tokens.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fieldlimits import Checked, NonNegativeInt, PositiveInt

Slots = tuple[tuple[int, ...], ...]
"""The expert of each slot, by rank."""


class ExpertPlacing(Protocol):
    """A policy that places the experts of a layer."""

    @property
    def num_redundant_experts(self) -> int:
        """Number of copies in a layer on all ranks in total, in addition to one slot per expert."""
        ...

    @property
    def step_interval(self) -> int | None:
        """Number of engine steps after which experts are placed again; None: never."""
        ...

    def place(self, loads: Sequence[float], num_ranks: int) -> Slots:
        """Returns the slots of each rank. loads: tokens of each expert, by its number."""
        ...


def in_order(num_experts: int, num_ranks: int, num_redundant_experts: int = 0) -> Slots:
    """Returns the experts by number, then copies from the first expert on, as vLLM loads them.

    4 experts and 2 copies on 2 ranks: 0, 1, 2 and 3, 0, 1. Raises ValueError if the ranks have unequal
    numbers of slots.
    """
    num_slots = num_experts + num_redundant_experts
    if num_slots % num_ranks:
        raise ValueError(
            f"expert_parallel_size={num_ranks}: must divide the {num_slots} slots, num_experts={num_experts} "
            f"+ num_redundant_experts={num_redundant_experts}"
        )
    size = num_slots // num_ranks
    experts = [slot % num_experts for slot in range(num_slots)]
    return tuple(tuple(experts[first : first + size]) for first in range(0, num_slots, size))


@dataclass(frozen=True, kw_only=True, slots=True)
class InOrder:
    """Experts by number, without copies, for the complete run."""

    @property
    def num_redundant_experts(self) -> int:
        return 0

    @property
    def step_interval(self) -> int | None:
        return None

    def place(self, loads: Sequence[float], num_ranks: int) -> Slots:
        return in_order(len(loads), num_ranks)


@dataclass(frozen=True, kw_only=True, slots=True)
class Eplb(Checked):
    """Redundant experts: DeepSeek-V3 (2024), section 3.4, and its balancer EPLB (2025).

    Each copy goes to the expert with the most tokens per copy; then the copies, the most loaded first, go to
    the rank with a free slot that has the fewest tokens. `hwmodels.operators.moe_routing` prices this
    placement. step_interval: vLLM's default is 3,000.
    """

    num_redundant_experts: NonNegativeInt = 0
    step_interval: PositiveInt = 3000

    def place(self, loads: Sequence[float], num_ranks: int) -> Slots:
        size = (len(loads) + self.num_redundant_experts) // num_ranks
        counts = [(-load, expert, 1) for expert, load in enumerate(loads)]
        heapq.heapify(counts)
        for _ in range(self.num_redundant_experts):
            _, expert, count = counts[0]
            heapq.heapreplace(counts, (-loads[expert] / (count + 1), expert, count + 1))
        copies = [(load, expert) for load, expert, count in counts for _ in range(count)]
        slots: list[list[int]] = [[] for _ in range(num_ranks)]
        with_space = [(0.0, rank) for rank in range(num_ranks)]
        for negative, expert in sorted(copies):
            load, rank = heapq.heappop(with_space)
            slots[rank].append(expert)
            if len(slots[rank]) < size:
                heapq.heappush(with_space, (load - negative, rank))
        return tuple(map(tuple, slots))
