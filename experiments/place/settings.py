"""Settings of `windtunnel place`: models, kinds of GPUs, and the objective."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from experiments.app.run_folder import check_output_file
from experiments.app.settings.compose import resolved
from fieldlimits import Checked, NonNegative, NonNegativeInt, Positive, Unit, check
from hwmodels.levels import LatencyLevel
from policies.batching import Batching
from policies.caching.pool import Caching
from policies.parallelism import Load
from policies.placement import Objective, Placing
from policies.scheduling import Scheduling
from sim.settings.build import build_as
from sim.settings.engine_limits import complete
from sim.setup.engine_profile import EngineProfile
from sim.setup.estimates import ReplicaNeeds

ANY_GPU = {"name": "a GPU", "memory_bytes": 80 * 2**30}
"""Device for whose limits the settings are checked before those of each kind of GPU are known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings(Checked):
    """One model to place."""

    name: str
    """Choice of configs/model."""
    weights: str | None = None
    """Format of the stored weights; None: as in the checkpoint."""
    demand: Annotated[NonNegative | None, "null for no limit"] = None
    """Output tokens/s, or replicas; None: no limit."""
    value: NonNegative = 1.0
    """Value of one output token, or of one replica."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSettings(Checked):
    """One kind of GPU."""

    name: str
    """Choice of configs/hardware."""
    count: NonNegativeInt = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceSettings(Checked):
    """Settings of `windtunnel place`."""

    models: tuple[ModelSettings, ...]
    gpus: tuple[GpuSettings, ...]
    placing: Placing
    latency: LatencyLevel
    batching: Batching
    scheduling: Scheduling
    caching: Caching
    engine: EngineProfile
    objective: Objective = Objective.value
    counts: Literal["tokens", "replicas"] = "tokens"
    prompt: int = 512
    output: int = 256
    min_seqs: int = 8
    max_models_per_gpu: int = 4
    tensor_parallel_sizes: tuple[int, ...] = (1, 2, 4, 8)
    time_slice_ms: Annotated[Positive, Unit("ms")] = 2.0
    nodes: Mapping[str, Any] = field(default_factory=dict)
    """The nodes `engine` and `batching` as composed, in which limits of the engine may depend on the GPU."""
    measured: tuple[str, ...] = ()
    """summary.json files of `windtunnel capacity`: rates within the SLO in place of the roofline's."""
    out: str | None = "placement.json"

    def __post_init__(self) -> None:
        check(self)
        for key, parts in (("models", self.models), ("gpus", self.gpus)):
            if not parts:
                raise ValueError(f"{key}=[]: must have at least one entry, such as [{{name: ...}}]")
            names = [part.name for part in parts]
            for i, name in enumerate(names):
                if (first := names.index(name)) < i:
                    raise ValueError(
                        f"{key}[{i}].name={name}: must be named only once; {key}[{first}] names it already"
                    )
        if not any(gpu.count for gpu in self.gpus):
            raise ValueError("gpus[0].count=0: must be >= 1 in at least one entry of gpus")
        if self.out is not None:
            check_output_file("out", self.out)
        _ = self.needs

    @property
    def needs(self) -> ReplicaNeeds:
        return ReplicaNeeds(
            load=Load(self.prompt, self.output),
            min_seqs=self.min_seqs,
            tensor_parallel_sizes=self.tensor_parallel_sizes,
        )


def with_limits(config: Mapping[str, Any], hardware: Any) -> dict[str, Any]:
    """Returns a config, interpolations resolved, with the limits of its engine for this device."""
    own = deepcopy({**config, "hardware": hardware})
    complete(own)
    del own["hardware"]
    return resolved(own)


def read_settings(composed: Mapping[str, Any]) -> PlaceSettings:
    """Returns the settings of a composed config, interpolations kept. Raises ConfigError."""
    nodes = {key: composed[key] for key in ("engine", "batching")}
    own = with_limits(composed, ANY_GPU)
    for key, kind in (("models", ModelSettings), ("gpus", GpuSettings)):
        if isinstance(own[key], list):
            own[key] = [build_as(kind, part, f"{key}[{i}]") for i, part in enumerate(own[key])]
    settings: PlaceSettings = build_as(PlaceSettings, own, "")
    return replace(settings, nodes=nodes)
