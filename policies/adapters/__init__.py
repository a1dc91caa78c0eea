"""LoRA adapter policies: they decide which adapters an engine has on its GPU. One policy per file."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Self

from policies.adapters.registry import Registry
from policies.adapters.residents import Residents
from policies.caching.pool import BlockPool
from policies.user_code.decisions import returned

EVICTIONS = ("lru", "lfu")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterServing:
    """Settings of every adapter policy. A policy overrides `residents`, and `slots` if it has slots.

    All adapters are on disk. Host memory keeps the most recently loaded ones.
    """

    simulation_only: ClassVar[bool] = False
    """Whether only the simulator supports the policy, not the GPU engine."""

    eviction: str = "lru"
    """Eviction order of unused adapters: lru (least recently used) or lfu (fewest uses)."""
    max_cpu_loras: int | None = None
    """Maximum number of adapters in host memory; None: all served adapters."""
    prefetch: int = 0
    """Maximum number of adapters that are loaded into free space for requests in the queue."""

    def __post_init__(self) -> None:
        if self.eviction not in EVICTIONS:
            raise ValueError(f"eviction={self.eviction}: must be one of {', '.join(EVICTIONS)}")
        if self.max_cpu_loras is not None and self.max_cpu_loras < 1:
            raise ValueError(f"max_cpu_loras={self.max_cpu_loras}: must be >= 1; null for all")
        if self.prefetch < 0:
            raise ValueError(f"prefetch={self.prefetch}: must be >= 0 adapters; 0 loads none in advance")

    @property
    def slots(self) -> tuple[int, int]:
        """Number and rank of the slots for which memory is reserved."""
        return 0, 0

    def fitted(self, ranks: Iterable[int]) -> Self:
        """Returns the settings for adapters of these ranks; only those that follow from the ranks change."""
        return self

    @abstractmethod
    def residents(self, registry: Registry, pool: BlockPool) -> Residents:
        """Returns the `Residents` of an engine. Raises ValueError if the settings do not fit the adapters."""
        raise NotImplementedError


def residents_of(serving: AdapterServing, registry: Registry, pool: BlockPool) -> Residents:
    """Returns the `Residents` of an engine. Raises WrongDecisionError if a policy makes something else."""
    residents: object = serving.residents(registry, pool)
    if not isinstance(residents, Residents):
        rule = "must return a policies.adapters.residents.Residents"
        raise returned(serving, "residents", residents, rule)
    return residents


def check_time(name: str, time_s: float) -> None:
    """Raises ValueError unless a setting is a finite time > 0."""
    if not 0 < time_s < inf:
        raise ValueError(f"{name}={time_s}: must be a finite time > 0 s")
