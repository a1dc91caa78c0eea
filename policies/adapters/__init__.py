"""LoRA adapter policies: they decide which adapters are on an engine's GPU (`serving`)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

from fieldlimits import Checked, NonNegativeInt, OneOf, PositiveInt, Unit
from policies.adapters.serving import Registry, Residents
from policies.caching.pool import BlockPool
from policies.user_code import returned

EVICTIONS = ("lru", "lfu")


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterServing(Checked):
    """Settings of every adapter policy. A policy overrides `residents`, and `slots` if it has slots.

    All adapters are on disk. Host memory keeps the most recently loaded ones.
    """

    simulation_only: ClassVar[bool] = False
    """Whether only the simulator supports the policy, not the GPU engine."""

    eviction: Annotated[str, OneOf(EVICTIONS)] = "lru"
    """Eviction order of unused adapters: lru (least recently used) or lfu (fewest uses)."""
    max_cpu_loras: Annotated[PositiveInt | None, "null for all"] = None
    """Maximum number of adapters in host memory; None: all served adapters."""
    prefetch: Annotated[NonNegativeInt, Unit("adapters"), "0 loads none in advance"] = 0
    """Maximum number of adapters prefetched into free space for requests in the queue."""

    @property
    def slots(self) -> tuple[int, int]:
        """Number and rank of the slots for which memory is reserved."""
        return 0, 0

    def fitted(self, ranks: Iterable[int]) -> Self:
        """Returns the settings for adapters of these ranks; only settings that depend on the ranks change."""
        return self

    @abstractmethod
    def residents(self, registry: Registry, pool: BlockPool) -> Residents:
        """Returns the `Residents` of an engine. Raises ValueError if the settings do not fit the adapters."""
        raise NotImplementedError


def residents_of(serving: AdapterServing, registry: Registry, pool: BlockPool) -> Residents:
    """Returns the `Residents` of an engine. Raises WrongDecisionError if a policy creates anything else."""
    residents: object = serving.residents(registry, pool)
    if not isinstance(residents, Residents):
        rule = "must return a policies.adapters.serving.Residents"
        raise returned(serving, "residents", residents, rule)
    return residents
