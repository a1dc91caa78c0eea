"""Fixed slots for adapters, as in vLLM: `max_loras` slots of rank `max_lora_rank`.

For the kernels see Chen et al., "Punica: Multi-Tenant LoRA Serving", MLSys 2024. A batch mixes the adapters
in the slots. The memory of the slots is reserved when the engine starts. An adapter of a smaller rank is
padded to the slot's rank, and the kernels also read and compute the padding. A request that waits for a slot
is skipped, as in vLLM: later requests are admitted before it if their adapter is resident, or if they need
none.
Memory pressure: none, as slots are not part of KV memory. Horizon: the plan repeats until an event.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from typing import Annotated, Any, Self

from fieldlimits import OneOf, PositiveInt, Unit
from policies.adapters import AdapterServing
from policies.adapters.serving import Registry, Residents
from policies.caching.pool import BlockPool

MAX_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
DEFAULT_RANK = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedSlots(AdapterServing):
    """Settings with the names of vLLM's options."""

    max_loras: Annotated[PositiveInt, Unit("slot")] = 8
    """Number of slots: maximum number of adapters on the GPU, and in a batch."""
    max_lora_rank: Annotated[
        int | None, OneOf(MAX_RANKS), "as in vLLM", "null for the smallest that fits"
    ] = None
    """Maximum rank of an adapter, and the rank of every slot, which the kernels compute completely; None: the
    smallest of vLLM's ranks that fits the served adapters, or vLLM's default of 16 if no adapters are known.
    """
    pinned: tuple[str, ...] = ()
    """Adapters that are loaded first and are never evicted."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "pinned", tuple(self.pinned))
        AdapterServing.__post_init__(self)
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras={self.max_cpu_loras}: must be >= max_loras={self.max_loras}, because host "
                "memory keeps the adapters of all slots; null for all adapters"
            )
        if len(set(self.pinned)) < len(self.pinned) or len(self.pinned) > self.max_loras:
            raise ValueError(
                f"pinned={list(self.pinned)}: must be at most max_loras={self.max_loras} different adapters"
            )

    @property
    def slots(self) -> tuple[int, int]:
        """Number and rank of the slots."""
        return self.max_loras, self.max_lora_rank or DEFAULT_RANK

    def fitted(self, ranks: Iterable[int]) -> Self:
        """Returns the settings with slots of the smallest rank that fits these adapters, if none was set."""
        highest = max(ranks, default=DEFAULT_RANK)
        if self.max_lora_rank is not None:
            return self
        return replace(
            self, max_lora_rank=next((rank for rank in MAX_RANKS if rank >= highest), MAX_RANKS[-1])
        )

    def residents(self, registry: Registry, pool: BlockPool) -> SlotResidents:
        """Returns the adapter slots of an engine."""
        self.check(registry)
        return SlotResidents(
            registry,
            num_slots=self.max_loras,
            slot_rank=self.slots[1],
            pinned=self.pinned,
            eviction=self.eviction,
            max_host=self.max_cpu_loras,
            num_prefetched=self.prefetch,
        )

    def check(self, registry: Registry) -> None:
        """Raises ValueError if the slots do not fit the adapters."""
        if registry.max_rank > self.slots[1]:
            raise ValueError(
                f"max_lora_rank={self.slots[1]}: must be >= {registry.max_rank}, the largest rank of "
                "the served adapters"
            )
        names = {adapter.name for adapter in registry.adapters}
        for name in self.pinned:
            if name not in names:
                raise ValueError(f"pinned={name}: must be one of the served adapters")
        if 0 < len(self.pinned) == self.max_loras < len(registry):
            raise ValueError(
                f"pinned={list(self.pinned)}: must leave a slot of max_loras={self.max_loras} to the other "
                f"{len(registry) - len(self.pinned)} adapters"
            )


class SlotResidents(Residents):
    """Adapters in slots."""

    def __init__(
        self,
        registry: Registry,
        *,
        num_slots: int,
        slot_rank: int,
        pinned: tuple[str, ...] = (),
        **common: Any,
    ) -> None:
        super().__init__(registry, **common)
        self._slot_rank = slot_rank
        self._pinned = frozenset(pinned)
        self._free_slots = list(range(num_slots))
        self._slots: dict[str, int] = {}
        heapify(self._free_slots)
        for name in pinned:
            self._load(name)

    def slot_of(self, name: str) -> int | None:
        """Returns the slot of an adapter on the GPU or being loaded, else None."""
        return self._slots.get(name)

    def open_adapters(self) -> Collection[str | None] | None:
        """Returns the adapters with a slot if all slots are in use."""
        return None if self._idle or self._free_slots else (None, *self._slots)

    def _is_pinned(self, name: str) -> bool:
        return name in self._pinned

    def _padded_rank(self, name: str) -> int:
        return self._slot_rank

    def _fits(self, name: str) -> bool:
        return bool(self._free_slots)

    def _allocate(self, name: str) -> int | None:
        self._slots[name] = heappop(self._free_slots)
        return self._slots[name]

    def _free(self, name: str) -> None:
        heappush(self._free_slots, self._slots.pop(name))
