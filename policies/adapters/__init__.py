"""LoRA adapter policies: which adapters an engine has on its GPU. One policy per file."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from policies.adapters.registry import Registry
from policies.adapters.residents import Residents
from policies.caching.pool import BlockPool

EVICTIONS = ("lru", "lfu")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterServing:
    """Settings of a way to serve adapters. A policy overrides `residents` and what else differs.

    All adapters lie on disk. Host memory keeps those that were loaded last.
    """

    simulation_only: ClassVar[bool] = False
    """Whether the GPU engine does not support it."""

    eviction: str = "lru"
    """Which unused adapter is evicted: lru (least recently used) or lfu (fewest uses)."""
    max_cpu_loras: int | None = None
    """Maximum number of adapters in host memory; None: all that are served."""
    prefetch: int = 0
    """Number of adapters of waiting requests that are loaded before their turn, as far as there is room."""

    def __post_init__(self) -> None:
        if self.eviction not in EVICTIONS:
            raise ValueError(f"eviction={self.eviction}: must be one of {', '.join(EVICTIONS)}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < 1:
            raise ValueError(f"max_cpu_loras={self.max_cpu_loras}: must be >= 1; null for all")
        if self.prefetch < 0:
            raise ValueError(f"prefetch={self.prefetch}: must be >= 0 adapters; 0 loads none beforehand")

    @property
    def slots(self) -> tuple[int, int]:
        """Number and rank of the slots that are reserved for adapters."""
        return 0, 0

    def residents(self, registry: Registry, pool: BlockPool) -> Residents:
        """Returns the `Residents` of one engine. Raises ValueError if settings and adapters do not fit."""
        raise NotImplementedError


def check_time(name: str, time_s: float) -> None:
    """Raises ValueError unless a setting is a finite time > 0."""
    if not 0 < time_s < inf:
        raise ValueError(f"{name}={time_s}: must be a finite time > 0 s")
