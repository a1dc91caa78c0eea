"""Adapters policy: decides which LoRA adapters an engine holds on its GPU. Describe it here; name the paper.

It sees: which requests wait for each adapter and which use it; which adapters are on the GPU, being loaded,
and in host memory; sizes and ranks (policies.adapters.serving.Residents keeps these records).
It never sees output lengths or future requests.
It may: define the memory that an adapter takes (`_fits`, `_enter`, `_leave`, `_blocks_of`), choose the
adapter to evict (`_victim`) and the requests that may start (`may_start`), and load, evict and bound a step
in `before_step`.
It must promise: an adapter in use is not evicted, no request starves, and equal states give equal decisions:
no random numbers, no clock other than `now`.

Memory pressure: slots are not KV memory. Horizon: event; 1 while adapters are loaded or evicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from fieldlimits import NonNegativeInt, Unit
from policies.adapters.fixed_slots import FixedSlots, SlotResidents
from policies.adapters.serving import Registry
from policies.caching.pool import BlockPool


@dataclass(frozen=True, kw_only=True, slots=True)
class MyPolicy(FixedSlots):
    """Slots as in vLLM; the smallest unused adapter is evicted first, because it reloads fastest."""

    # Settings are the fields, with their defaults; FixedSlots has the settings of slots. The state of the
    # policy is kept by its residents, of which each engine has its own.
    num_spared: Annotated[NonNegativeInt, Unit("adapters")] = 1
    """Most recently used adapters that are evicted only if no other adapter can be."""

    def residents(self, registry: Registry, pool: BlockPool) -> MyPolicyResidents:
        """Returns the slots of an engine."""
        self.check(registry)
        return MyPolicyResidents(
            registry,
            num_spared=self.num_spared,
            num_slots=self.max_loras,
            slot_rank=self.slots[1],
            pinned=self.pinned,
            max_host=self.max_cpu_loras,
            num_prefetched=self.prefetch,
        )


class MyPolicyResidents(SlotResidents):
    """Adapters of one engine, in slots."""

    def __init__(self, registry: Registry, *, num_spared: int, num_slots: int, **slots: Any) -> None:
        self._num_spared = num_spared
        super().__init__(registry, num_slots=num_slots, **slots)

    def _victim(self, keep: str | None = None) -> str | None:
        """Chooses the adapter to evict: an unused one, if possible one that no request waits for."""
        idle = [name for name in self._idle if name != keep]  # the least recently used first
        unwanted = [name for name in idle if name not in self._waiting] or idle
        candidates = unwanted[: max(1, len(unwanted) - self._num_spared)]
        return min(candidates, key=lambda name: (self.registry.num_bytes(name), name), default=None)
