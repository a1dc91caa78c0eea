"""Which models go on which GPUs, and how many replicas of each. One policy a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf
from typing import Protocol


class Objective(Enum):
    """What a placement is for."""

    value = "the most value served by GPUs that are there"
    cost = "the least rent for a demand that must be met"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool:
    """GPUs of one kind."""

    name: str
    count: int
    """That there are; for cost: that could be rented."""
    memory_bytes: float
    """Of each, for replicas."""
    usd_per_hour: float = 0.0
    gpus_per_node: int = 8
    switch_share: float = 0.0
    """Of a GPU's time, lost where more than one replica is busy on it."""

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"gpus: count={self.count} of {self.name}: must be >= 0")
        if not 0 <= self.switch_share < 1:
            raise ValueError(f"switch_share={self.switch_share}: must be >= 0 and < 1")

    @property
    def nodes(self) -> list[int]:
        """GPUs of each node; the last one may be smaller."""
        whole, left = divmod(self.count, self.gpus_per_node)
        return [self.gpus_per_node] * whole + [left] * (left > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand:
    """Of one model."""

    model: str
    rate: float | None = None
    """Output tokens/s (or whatever rates count) that are asked for; None: all that can be had."""
    value: float = 1.0
    """Of each of them."""

    def __post_init__(self) -> None:
        if self.rate is not None and not 0 <= self.rate < inf:
            raise ValueError(
                f"models: demand={self.rate} of {self.model}: must be >= 0, or null for no limit"
            )
        if not 0 <= self.value < inf:
            raise ValueError(f"models: value={self.value} of {self.model}: must be >= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosting:
    """One replica of a model on so many GPUs of a pool."""

    model: str
    pool: str
    num_gpus: int = 1
    """1, 2, 4, ...: inside one node."""
    bytes_each: float
    """That it needs at least, on each GPU."""
    rate: Callable[[float], float]
    """Served, given so many bytes on each GPU and all of their time."""

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.num_gpus & (self.num_gpus - 1):
            raise ValueError(f"num_gpus={self.num_gpus}: must be 1, 2, 4, 8, ...")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """What is to be placed, and where."""

    pools: tuple[Pool, ...]
    demands: tuple[Demand, ...]
    hostings: tuple[Hosting, ...]
    """None for a model on a pool: it cannot be there."""
    objective: Objective = Objective.value
    max_models_per_gpu: int = 1
    time_shared: bool = True
    """False: every replica serves its rate whoever shares its GPU, as if memory were all that counts."""

    def __post_init__(self) -> None:
        if self.max_models_per_gpu < 1:
            raise ValueError(f"max_models_per_gpu={self.max_models_per_gpu}: must be >= 1")
        if not any(pool.count for pool in self.pools):
            raise ValueError("gpus=[]: must name a GPU of which there is one, say [{name:h100_sxm,count:2}]")
        if not self.demands:
            raise ValueError("models=[]: must name a model, say models=[{name:llama3_1_8b}]")
        hosted = {hosting.model for hosting in self.hostings}
        for i, demand in enumerate(self.demands if self.objective is Objective.cost else ()):
            if demand.rate is None:
                raise ValueError(
                    f"models[{i}].demand=null: objective=cost needs one, tokens/s (of {demand.model})"
                )
            if demand.rate and demand.model not in hosted:
                raise ValueError(
                    f"models[{i}].name={demand.model}: fits none of the GPUs; it needs larger ones, or more"
                )

    def pool(self, name: str) -> Pool:
        return next(pool for pool in self.pools if pool.name == name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A GPU, or a group of them, and what it holds."""

    pool: str
    num_gpus: int
    models: tuple[str, ...]
    """By name; one model as often as it has replicas here."""
    rates: tuple[float, ...]
    """Of each, with the GPU to itself."""
    time_share: float = 1.0
    """Of the GPU's time that replicas get, all together."""

    @property
    def slowdown(self) -> float:
        """Of each iteration, while all replicas here are busy: the others' slices and the switches."""
        return len(self.models) / self.time_share


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A placement and what it serves."""

    units: tuple[tuple[Unit, int], ...]
    """Each with how many such units there are."""
    served: Mapping[str, float]
    """By model, no more than is asked for."""
    value: float
    usd_per_hour: float
    met: bool
    """Whether every demand is."""
    notes: tuple[str, ...] = field(default=())

    @property
    def gpus(self) -> dict[str, int]:
        """In use, by pool."""
        used: dict[str, int] = {}
        for unit, count in self.units:
            used[unit.pool] = used.get(unit.pool, 0) + unit.num_gpus * count
        return used

    @property
    def replicas(self) -> dict[str, int]:
        """By model."""
        found: dict[str, int] = {}
        for unit, count in self.units:
            for model in unit.models:
                found[model] = found.get(model, 0) + count
        return found


class Placing(Protocol):
    """Places models."""

    def place(self, problem: Problem) -> Plan:
        """Raises ValueError where a demand cannot be met, with the numbers."""
        ...
