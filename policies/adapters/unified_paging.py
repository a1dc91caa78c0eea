"""Unified paging, as in S-LoRA: adapters are stored in KV blocks, from the same pool as the KV.

Sheng et al., "S-LoRA: Serving Thousands of Concurrent LoRA Adapters", MLSys 2024, section 5 (unified paging).
An adapter takes as many KV blocks as its weights fill, so a batch may mix any number of adapters of any
ranks, and the other blocks are free for KV. The kernels gather the adapters of the batch without padding.
Memory pressure: unused adapters are evicted for KV and for other adapters. Horizon: the plan repeats until an
event; after a load or an eviction of an adapter it holds for one iteration.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any, ClassVar

from policies.adapters import AdapterServing
from policies.adapters.serving import Adapter, Registry, Residents
from policies.caching.pool import BlockPool
from policies.core.sequence import SequenceView
from policies.core.view import StepView


@dataclass(frozen=True, kw_only=True, slots=True)
class UnifiedPaging(AdapterServing):
    """Settings of a pool that adapters and KV share."""

    simulation_only: ClassVar[bool] = True

    def residents(self, registry: Registry, pool: BlockPool) -> PagedResidents:
        """Returns the adapters of an engine in its KV pool. Raises ValueError if the pool is not paged."""
        if not pool.can_fork:
            raise ValueError(
                "caching: adapters cannot be stored in memory that is reserved in contiguous regions; choose "
                "caching=paged, prefix or radix, or adapters=fixed_slots"
            )
        if not registry.memory.block_bytes > 0:
            raise ValueError("block_bytes=0: must be > 0, because adapters are stored in KV blocks")
        return PagedResidents(
            registry,
            pool=pool,
            eviction=self.eviction,
            max_host=self.max_cpu_loras,
            num_prefetched=self.prefetch,
        )


class PagedResidents(Residents):
    """Adapters in KV blocks."""

    def __init__(self, registry: Registry, *, pool: BlockPool, **common: Any) -> None:
        super().__init__(registry, **common)
        self._pool = pool
        self._num_blocks_of = {adapter.name: self._blocks_to_hold(adapter) for adapter in registry.adapters}

    def serve(self, adapter: Adapter) -> None:
        super().serve(adapter)
        self._num_blocks_of[adapter.name] = self._blocks_to_hold(adapter)

    def may_start(self, seq: SequenceView) -> bool:
        """Returns True: the adapter's blocks are requested together with those of the KV."""
        return True

    def _blocks_to_hold(self, adapter: Adapter) -> int:
        return max(1, ceil(self.registry.num_bytes(adapter.name) / self.registry.memory.block_bytes))

    def _blocks_of(self, name: str) -> int:
        return self._num_blocks_of[name]

    def _fits(self, name: str) -> bool:
        return self._num_blocks_of[name] <= self._pool.num_free

    def _fits_prefetched(self, name: str, view: StepView) -> bool:
        """Returns whether there are free blocks beyond those for the next tokens of running sequences.

        An adapter being loaded cannot be evicted. Sequences preempted because of it would be admitted again
        after the load, and preempted by the next prefetch.
        """
        wanted = sum(max(seq.width, view.num_blocks_missing(seq)) for seq in view.running)
        return self._num_blocks_of[name] + wanted <= self._pool.num_free

    def _allocate(self, name: str) -> int | None:
        num_blocks = self._num_blocks_of[name]
        self._pool.take_extra(num_blocks)
        self.num_blocks += num_blocks
        return None

    def _free(self, name: str) -> None:
        num_blocks = self._num_blocks_of[name]
        self._pool.free_extra(num_blocks, ())
        self.num_blocks -= num_blocks
