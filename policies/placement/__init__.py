"""Placement policies: they place replicas of several models on the GPUs of a fleet. One idea per file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Protocol

from fieldlimits import Checked, Ge, Lt, NonNegative, NonNegativeInt, PositiveInt, check


class Objective(Enum):
    """The objective of a placement."""

    value = "the most value served by the given GPUs"
    cost = "the least rent that meets the demand"


@dataclass(frozen=True, kw_only=True, slots=True)
class Pool(Checked):
    """GPUs of one type."""

    name: str
    count: NonNegativeInt
    """Number of available GPUs; for objective cost the maximum number that could be rented."""
    memory_bytes: float
    """Memory of each GPU for replicas, in bytes."""
    usd_per_hour: float = 0.0
    gpus_per_node: int = 8
    switch_share: Annotated[float, Ge(0), Lt(1)] = 0.0
    """Share of a GPU's time lost to context switches while several replicas are busy on it."""

    @property
    def nodes(self) -> list[int]:
        """Number of GPUs of each node; the last node may be smaller."""
        whole, left = divmod(self.count, self.gpus_per_node)
        return [self.gpus_per_node] * whole + [left] * (left > 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Demand(Checked):
    """Demand for one model."""

    model: str
    rate: Annotated[NonNegative | None, "null for no limit"] = None
    """Demand in output tokens/s (or another unit, the same for all rates); None: as much as possible."""
    value: NonNegative = 1.0
    """Value of one output token (or other unit)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosting:
    """A possible replica of a model on num_gpus GPUs of a pool."""

    model: str
    pool: str
    num_gpus: int = 1
    """Number of GPUs: 1, 2, 4, ..., inside one node."""
    bytes_each: float
    """Minimum memory on each GPU, in bytes."""
    rate: Callable[[float], float]
    """Rate that the replica serves with these bytes of memory per GPU and all of the GPUs' time."""

    def __post_init__(self) -> None:
        if self.num_gpus < 1 or self.num_gpus & (self.num_gpus - 1):
            raise ValueError(f"num_gpus={self.num_gpus}: must be 1, 2, 4, 8, ...")


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem(Checked):
    """A placement problem: GPUs, demands and possible replicas."""

    pools: tuple[Pool, ...]
    demands: tuple[Demand, ...]
    hostings: tuple[Hosting, ...]
    """Possible replicas; a model without a hosting on a pool cannot be placed there."""
    objective: Objective = Objective.value
    max_models_per_gpu: PositiveInt = 1
    time_shared: bool = True
    """Whether the replicas of a GPU share its time; if False, each serves its full rate."""

    def __post_init__(self) -> None:
        check(self)
        if not any(pool.count for pool in self.pools):
            raise ValueError(
                "gpus=[]: must have a GPU with count >= 1, for example gpus=[{name:h100_sxm,count:2}]"
            )
        if not self.demands:
            raise ValueError("models=[]: must have a model, for example models=[{name:llama3_1_8b}]")
        hosted = {hosting.model for hosting in self.hostings}
        for i, demand in enumerate(self.demands if self.objective is Objective.cost else ()):
            if demand.rate is None:
                raise ValueError(
                    f"models[{i}].demand=null: objective=cost needs the demand for {demand.model} in tokens/s"
                )
            if demand.rate and demand.model not in hosted:
                raise ValueError(
                    f"models[{i}].name={demand.model}: fits none of the GPUs; add larger GPUs, or more"
                )

    def pool(self, name: str) -> Pool:
        """Returns the pool of a name."""
        return next(pool for pool in self.pools if pool.name == name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A GPU, or a group of GPUs, and the replicas on it."""

    pool: str
    num_gpus: int
    models: tuple[str, ...]
    """Names of the models, one per replica."""
    rates: tuple[float, ...]
    """Rate of each replica with the GPU to itself."""
    time_share: float = 1.0
    """Share of the GPU's time available to all replicas in total, without switches."""

    @property
    def slowdown(self) -> float:
        """Factor on each iteration's time while all replicas are busy, from time slicing and switches."""
        return len(self.models) / self.time_share


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A placement and the rates that it serves."""

    units: tuple[tuple[Unit, int], ...]
    """Distinct units, each with its count."""
    served: Mapping[str, float]
    """Rate served per model, at most the demand."""
    value: float
    usd_per_hour: float
    met: bool
    """Whether every demand is met."""
    notes: tuple[str, ...] = field(default=())

    @property
    def gpus(self) -> dict[str, int]:
        """Number of GPUs in use, by pool."""
        used: dict[str, int] = {}
        for unit, count in self.units:
            used[unit.pool] = used.get(unit.pool, 0) + unit.num_gpus * count
        return used

    @property
    def replicas(self) -> dict[str, int]:
        """Number of replicas, by model."""
        found: dict[str, int] = {}
        for unit, count in self.units:
            for model in unit.models:
                found[model] = found.get(model, 0) + count
        return found


class Placing(Protocol):
    """A placement policy."""

    def place(self, problem: Problem) -> Plan:
        """Returns a placement. Raises ValueError if the objective is cost and the demand cannot be met."""
        ...
