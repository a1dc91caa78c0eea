"""`windtunnel place`: which models go on which GPUs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Literal

import hydra
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from experiments.app.output_file import check_output_file
from experiments.app.terminal import plain_table, terminal_console
from experiments.place.measured import measured_rates, with_measured
from hwmodels.devices.time_slicing import TimeSlicing
from hwmodels.levels.rooflines import LatencyLevel
from policies.batching import Batching
from policies.caching.pool import Caching
from policies.parallelism import Load
from policies.placement import Demand, Hosting, Objective, Placing, Plan, Pool, Problem
from policies.scheduling import Scheduling
from sim.settings.build import build_as
from sim.settings.compose import Composition, ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.hydra_errors import composed
from sim.setup.deployment import Deployment
from sim.setup.engine_profile import EngineProfile
from sim.setup.placement_prices import ReplicaNeeds, hostings_of, pool_of, refusals, weights_only


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSettings:
    """One model of the fleet."""

    name: str
    """Of configs/model."""
    weights: str | None = None
    """How they are stored; None: as the checkpoint has them."""
    demand: float | None = None
    """Output tokens/s, or replicas; None: all that can be had."""
    value: float = 1.0
    """Of each of them."""

    def __post_init__(self) -> None:
        if self.demand is not None and not 0 <= self.demand < inf:
            raise ValueError(f"demand={self.demand}: must be >= 0, or null for no limit (of {self.name})")
        if not 0 <= self.value < inf:
            raise ValueError(f"value={self.value}: must be >= 0 (of {self.name})")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuSettings:
    """One kind of GPU."""

    name: str
    """Of configs/hardware."""
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 0:
            raise ValueError(f"count={self.count}: must be >= 0 (of {self.name})")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceSettings:
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
    time_slice_ms: float = 2.0
    measured: tuple[str, ...] = ()
    """summary.json files of `windtunnel capacity`: rates within the SLO in place of the roofline's."""
    out: str | None = "placement.json"

    def __post_init__(self) -> None:
        for key, parts in (("models", self.models), ("gpus", self.gpus)):
            if not parts:
                raise ValueError(f"{key}=[]: must name one, say [{{name: ...}}]")
            names = [part.name for part in parts]
            for i, name in enumerate(names):
                if (first := names.index(name)) < i:
                    raise ValueError(f"{key}[{i}].name={name}: must be named once, {key}[{first}] has it")
        if not any(gpu.count for gpu in self.gpus):
            raise ValueError("gpus[0].count=0: must be >= 1, or that of another entry")
        if self.out is not None:
            check_output_file("out", self.out)
        if not 0 < self.time_slice_ms < inf:
            raise ValueError(f"time_slice_ms={self.time_slice_ms}: must be > 0 ms")
        _ = self.needs

    @property
    def needs(self) -> ReplicaNeeds:
        return ReplicaNeeds(
            load=Load(self.prompt, self.output),
            min_seqs=self.min_seqs,
            tensor_parallel_sizes=self.tensor_parallel_sizes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A problem and what a policy made of it."""

    settings: PlaceSettings
    problem: Problem
    plan: Plan
    alone: dict[str, dict[str, float]]
    """Output tokens/s of a replica with its GPUs to itself, by model and GPU."""
    notes: list[str]


# What was placed when the settings were checked: once, not twice.
_checked: dict[str, Placed] = {}


def check(cfg: DictConfig, composition: Composition) -> None:
    """Raises ConfigError for whatever a user can mend, a demand that cannot be met among it."""
    _checked.clear()
    _checked[OmegaConf.to_yaml(cfg)] = place(read_settings(cfg), composition.source.dirs)


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="place")
def main(cfg: DictConfig) -> None:
    """Place, print, write."""
    key, settings = OmegaConf.to_yaml(cfg), read_settings(cfg)
    state = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()  # models and GPUs are composed from here on
    placed = _checked.pop(key) if key in _checked else place(settings, [CONFIG_DIR])
    GlobalHydra.instance().hydra = state  # a multirun goes on with it
    console = terminal_console()
    print_plan(placed, console)
    if settings.out is not None:
        Path(settings.out).write_text(json.dumps(as_json(placed), indent=2) + "\n", encoding="utf-8")
        console.print(settings.out, style="dim", soft_wrap=True, highlight=False)


def place(settings: PlaceSettings, dirs: Sequence[Path]) -> Placed:
    """Raises ConfigError, also where the demand cannot be met."""
    problem, notes = pose(settings, dirs)
    try:
        plan = settings.placing.place(problem)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    alone: dict[str, dict[str, float]] = {}
    for hosting in problem.hostings:
        name = hosting.pool if hosting.num_gpus == 1 else f"{hosting.num_gpus} x {hosting.pool}"
        rate = hosting.rate(problem.pool(hosting.pool).memory_bytes)
        alone.setdefault(hosting.model, {})[name] = rate
    return Placed(settings=settings, problem=problem, plan=plan, alone=alone, notes=notes)


def read_settings(cfg: DictConfig) -> PlaceSettings:
    """Raises ConfigError."""
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    own = {key: value for key, value in plain.items() if key != "hydra"}
    for key, kind in (("models", ModelSettings), ("gpus", GpuSettings)):
        if isinstance(own[key], list):
            own[key] = [build_as(kind, part, f"{key}[{i}]") for i, part in enumerate(own[key])]
    settings: PlaceSettings = build_as(PlaceSettings, own, "")
    return settings


def pose(settings: PlaceSettings, dirs: Sequence[Path]) -> tuple[Problem, list[str]]:
    """Every model priced on every kind of GPU; and why some fit nowhere. Raises ConfigError."""
    models = {own.name: own for own in settings.models}
    simulate = ConfigSource(config_name="simulate", dirs=dirs)
    specs = {
        own.name: _composed(simulate, "model", own.name, f"models[{i}]", own.weights)
        for i, own in enumerate(settings.models)
    }
    devices = {
        own.name: _composed(simulate, "hardware", own.name, f"gpus[{i}]")
        for i, own in enumerate(settings.gpus)
    }
    rates = measured_rates(settings.measured)
    pools, hostings, refused = list[Pool](), list[Hosting](), dict[tuple[str, str], dict[int, str]]()
    try:
        for gpu, count in ((own.name, own.count) for own in settings.gpus):
            pool = None
            for i, name in enumerate(models):
                parts = {"model": specs[name]["model"], **devices[gpu]}
                try:
                    deployment = _deployment(settings, parts)
                except ConfigError as error:
                    raise _located(
                        error, "model", f"models[{i}]", f"models[{i}].name={name} on {gpu}"
                    ) from error
                if pool is None:
                    slicing = TimeSlicing(slice_s=settings.time_slice_ms / 1e3)
                    pool = pool_of(gpu, count, deployment, slicing)
                if settings.counts == "replicas":
                    pool = _whole(pool, deployment)
                    hostings += weights_only(name, pool, deployment.model.weight_bytes_per_rank())
                    continue
                found, refused[name, gpu] = hostings_of(name, gpu, deployment, settings.needs)
                hostings += [with_measured(hosting, deployment, rates) for hosting in found]
            if pool is not None:
                pools.append(pool)
        problem = Problem(
            pools=tuple(pools),
            demands=tuple(Demand(model=n, rate=own.demand, value=own.value) for n, own in models.items()),
            hostings=tuple(hostings),
            objective=settings.objective,
            max_models_per_gpu=settings.max_models_per_gpu,
            time_shared=settings.counts == "tokens",
        )
    except ValueError as error:
        nowhere = [name for name in models if name not in {hosting.model for hosting in hostings}]
        reasons = "; ".join(refusals(refused, nowhere)[:2])
        raise ConfigError(f"{error}{f' ({reasons})' if reasons else ''}") from error
    nowhere = [name for name in models if name not in {hosting.model for hosting in hostings}]
    few = [
        f"{name}: needs {least} GPUs of a kind, in one node; there are fewer"
        for name in models
        if name not in nowhere
        and (least := min(h.num_gpus for h in hostings if h.model == name))
        and not any(
            h.num_gpus <= min(problem.pool(h.pool).count, problem.pool(h.pool).gpus_per_node)
            for h in hostings
            if h.model == name
        )
    ]
    return problem, [*refusals(refused, nowhere), *few]


def _whole(pool: Pool, deployment: Deployment) -> Pool:
    """With all of the GPU's memory for weights."""
    return Pool(
        name=pool.name,
        count=pool.count,
        memory_bytes=deployment.hardware.memory_bytes,
        usd_per_hour=pool.usd_per_hour,
        gpus_per_node=pool.gpus_per_node,
    )


def _composed(
    source: ConfigSource, group: str, name: str, entry: str, weights: str | None = None
) -> dict[str, Any]:
    """The node of a choice, and, of hardware, of the calibration that comes with it."""
    overrides = [f"{group}={name}"] + ([f"model.weights={weights}"] if weights else [])
    try:
        cfg = composed(source, overrides)
    except ConfigError as error:
        raise _located(error, group, entry, f"{entry}.name={name}") from error
    keys = ("hardware", "calibration") if group == "hardware" else (group,)
    return {key: cfg[key] for key in keys}


def _located(error: ConfigError, group: str, entry: str, whole: str) -> ConfigError:
    """The same, where the user wrote it: model=x is models[0].name=x there. whole: of any other key."""
    text = str(error)
    for own, theirs in ((f"{group}=", f"{entry}.name="), ("model.weights=", f"{entry}.weights=")):
        if text.startswith(own):
            return ConfigError(f"{theirs}{text.removeprefix(own)}")
    return ConfigError(f"{whole}: {text}")


def _deployment(settings: PlaceSettings, parts: dict[str, Any]) -> Deployment:
    engine = {
        name: getattr(settings, name) for name in ("engine", "batching", "scheduling", "caching", "latency")
    }
    deployment: Deployment = build_as(Deployment, {**parts, **engine}, "")
    return deployment


def print_plan(placed: Placed, console: Console) -> None:
    """Two tables, what each GPU holds and what each model gets, and the sum."""
    plan, problem, unit = placed.plan, placed.problem, placed.settings.counts
    held = [["GPUs", "", "holds", "$/h"]]
    for found, count in sorted(plan.units, key=lambda pair: (pair[0].pool, pair[0].models)):
        rent = problem.pool(found.pool).usd_per_hour * found.num_gpus * count
        models = ", ".join(
            f"{found.models.count(name)} x {name}" if found.models.count(name) > 1 else name
            for name in dict.fromkeys(found.models)
        )
        held.append([f"{count * found.num_gpus}", found.pool, models, f"{rent:.2f}"])
    console.print(plain_table(held, label_columns=(1, 2)))
    served = [["model", "replicas", f"{unit} served", "asked for", "value"]]
    for demand in problem.demands:
        amount = plan.served[demand.model]
        asked = "all" if demand.rate is None else f"{demand.rate:,.0f}"
        replicas = str(plan.replicas.get(demand.model, 0))
        served.append([demand.model, replicas, f"{amount:,.1f}", asked, f"{amount * demand.value:,.1f}"])
    console.print(plain_table(served))
    used = sum(plan.gpus.values())
    there = sum(pool.count for pool in problem.pools)
    console.print(
        f"value {plan.value:,.1f}, {used} of {there} GPUs, ${plan.usd_per_hour:.2f} an hour"
        f"{', every demand met' if plan.met else ''}",
        highlight=False,
    )
    for found, _ in plan.units if problem.time_shared else ():
        if len(found.models) > 1:
            console.print(
                f"{', '.join(found.models)} on one {found.pool}: while all are busy, an iteration takes "
                f"{found.slowdown:.2f} times as long as alone ({1 - found.time_share:.1%} go into switches)",
                style="dim",
                highlight=False,
            )
    for note in placed.notes:
        console.print(note, style="yellow", highlight=False)


def as_json(placed: Placed) -> dict[str, Any]:
    """What is written."""
    plan = placed.plan
    return {
        "units": [
            {
                "gpu": unit.pool,
                "gpus_each": unit.num_gpus,
                "count": count,
                "models": list(unit.models),
                "tokens_per_s_alone": list(unit.rates),
                "time_share": unit.time_share,
                "slowdown": unit.slowdown if placed.problem.time_shared else 1.0,
            }
            for unit, count in plan.units
        ],
        "served": dict(plan.served),
        "replicas": plan.replicas,
        "gpus": plan.gpus,
        "value": plan.value,
        "usd_per_hour": plan.usd_per_hour,
        "met": plan.met,
        "alone": placed.alone,
        "notes": placed.notes,
    }
