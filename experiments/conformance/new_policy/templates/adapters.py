"""An adapters policy: which LoRA adapters an engine has on its GPU. Say what it does, and after which paper.

It sees: who waits for which adapter and who uses it, what is resident, on its way and in host memory, sizes
and ranks (policies.adapters.residents.Residents, which keeps the books).
It never sees how long an answer will be, nor who is to come.
It may: say what takes how much room (`_fits`, `_enter`, `_leave`, `_blocks_of`), who makes room (`_victim`)
and who may start (`may_start`); load, evict and bound a step in `before_step`.
It must promise: an adapter in use stays, everybody's turn comes, and the same decision when asked the same
again: no random numbers, no clock but `now`.

Memory pressure: slots are no KV memory. Horizon: event; 1 while adapters come or go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from policies.adapters.fixed_slots import FixedSlots, SlotResidents
from policies.adapters.registry import Registry
from policies.caching.pool import BlockPool


@dataclass(frozen=True, kw_only=True, slots=True)
class MyPolicy(FixedSlots):
    """Slots as in vLLM; the smallest unused adapter is evicted first, as it is reloaded the soonest."""

    # Settings are the fields, with their defaults; those of slots are FixedSlots'. What a policy remembers is
    # kept by its residents: each engine has its own.
    num_spared: int = 1
    """Adapters used last that are spared, as long as others can make room."""

    def __post_init__(self) -> None:
        FixedSlots.__post_init__(self)
        if self.num_spared < 0:
            raise ValueError(f"num_spared={self.num_spared}: must be >= 0 adapters")

    def residents(self, registry: Registry, pool: BlockPool) -> MyPolicyResidents:
        """An engine's slots."""
        self.check(registry)
        return MyPolicyResidents(
            registry,
            num_spared=self.num_spared,
            num_slots=self.max_loras,
            slot_rank=self.max_lora_rank,
            pinned=self.pinned,
            max_host=self.max_cpu_loras,
            num_prefetched=self.prefetch,
        )


class MyPolicyResidents(SlotResidents):
    """Adapters in slots, one engine's."""

    def __init__(self, registry: Registry, *, num_spared: int, num_slots: int, **slots: Any) -> None:
        self._num_spared = num_spared
        super().__init__(registry, num_slots=num_slots, **slots)

    def _victim(self, keep: str | None = None) -> str | None:
        """Chooses the adapter to evict: an unused one, if possible one that no request waits for."""
        idle = [name for name in self._idle if name != keep]  # the least recently used first
        unwanted = [name for name in idle if name not in self._waiting] or idle
        candidates = unwanted[: max(1, len(unwanted) - self._num_spared)]
        return min(candidates, key=lambda name: (self.registry.num_bytes(name), name), default=None)
