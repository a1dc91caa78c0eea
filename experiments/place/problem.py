"""Builds a placement problem from the settings and solves it with the placement policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.hydra_errors import composed
from experiments.place.measured import Replica, measured_rates, with_measured
from experiments.place.settings import GpuSettings, PlaceSettings, with_limits
from hwmodels.device import TimeSlicing
from policies.placement import Demand, Hosting, Plan, Pool, Problem
from sim.settings.build import build_as
from sim.settings.errors import ConfigError
from sim.setup.deployment import Deployment
from sim.setup.estimates import hostings_of, pool_of, refusals, weights_only


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """A placement problem and its solution."""

    settings: PlaceSettings
    problem: Problem
    plan: Plan
    alone: dict[str, dict[str, float]]
    """Output tokens/s of a replica with its GPUs to itself, by model and GPU."""
    notes: list[str]


UNMEASURED_SLICES = (
    "Models that share a GPU run in time slices, whose cost is a formula over the data sheet: it was "
    "compared with no measurement."
)


def place(settings: PlaceSettings, dirs: Sequence[Path]) -> Placed:
    """Builds and solves the problem. Raises ConfigError, also if the demand cannot be met."""
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
    if problem.time_shared and any(len(unit.models) > 1 for unit, _ in plan.units):
        notes = [*notes, UNMEASURED_SLICES]
    return Placed(settings=settings, problem=problem, plan=plan, alone=alone, notes=notes)


def pose(settings: PlaceSettings, dirs: Sequence[Path]) -> tuple[Problem, list[str]]:
    """Prices every model on every kind of GPU, with notes on models that fit on none. Raises ConfigError."""
    names = [own.name for own in settings.models]
    offers = _Offers(settings)
    try:
        offers.add_all(dirs)
        problem = Problem(
            pools=tuple(offers.pools),
            demands=tuple(Demand(model=m.name, rate=m.demand, value=m.value) for m in settings.models),
            hostings=tuple(offers.hostings),
            objective=settings.objective,
            max_models_per_gpu=settings.max_models_per_gpu,
            time_shared=settings.counts == "tokens",
        )
    except ValueError as error:
        reasons = "; ".join(offers.refusals(names)[:2])
        raise ConfigError(f"{error}{f' ({reasons})' if reasons else ''}") from error
    return problem, [*offers.refusals(names), *_too_few(problem, names)]


class _Offers:
    """Pools of GPUs, and the replicas of each model that each pool can host."""

    def __init__(self, settings: PlaceSettings) -> None:
        self._settings = settings
        self._refused: dict[tuple[str, str], dict[int, str]] = {}
        self.pools: list[Pool] = []
        self.hostings: list[Hosting] = []

    def add_all(self, dirs: Sequence[Path]) -> None:
        """Prices every model on every kind of GPU. Raises ConfigError and ValueError."""
        simulate = ConfigSource(config_name="simulate", dirs=dirs)
        specs = {
            own.name: _composed(simulate, "model", own.name, f"models[{i}]", own.weights)
            for i, own in enumerate(self._settings.models)
        }
        devices = {
            own.name: _composed(simulate, "hardware", own.name, f"gpus[{i}]")
            for i, own in enumerate(self._settings.gpus)
        }
        rates = measured_rates(self._settings.measured)
        for gpu in self._settings.gpus:
            pool = None
            for i, (name, spec) in enumerate(specs.items()):
                parts = {"model": spec["model"], **devices[gpu.name]}
                try:
                    deployment = _deployment(self._settings, parts)
                except ConfigError as error:
                    whole = f"models[{i}].name={name} on {gpu.name}"
                    raise _located(error, "model", f"models[{i}]", whole) from error
                pool = self._add(name, gpu, deployment, pool, rates)
            if pool is not None:
                self.pools.append(pool)

    def _add(
        self,
        model: str,
        gpu: GpuSettings,
        deployment: Deployment,
        pool: Pool | None,
        rates: Mapping[Replica, float],
    ) -> Pool:
        """Prices one model on one kind of GPU; the first model also creates the pool."""
        if pool is None:
            slicing = TimeSlicing(slice_s=self._settings.time_slice_ms / 1e3)
            pool = pool_of(gpu.name, gpu.count, deployment, slicing)
        if self._settings.counts == "replicas":
            pool = _whole(pool, deployment)
            self.hostings += weights_only(model, pool, deployment.model.weight_bytes_per_rank())
            return pool
        found, why_not = hostings_of(model, gpu.name, deployment, self._settings.needs)
        self._refused[model, gpu.name] = why_not
        self.hostings += [with_measured(hosting, deployment, rates) for hosting in found]
        return pool

    def refusals(self, models: Sequence[str]) -> list[str]:
        """Returns the reasons of models that fit on no GPU."""
        hosted = {hosting.model for hosting in self.hostings}
        return refusals(self._refused, [name for name in models if name not in hosted])


def _too_few(problem: Problem, models: Sequence[str]) -> list[str]:
    """Returns a note for each model that needs more GPUs of one node than there are."""
    problems = []
    for name in models:
        own = [hosting for hosting in problem.hostings if hosting.model == name]
        pools = [problem.pool(hosting.pool) for hosting in own]
        if own and not any(
            hosting.num_gpus <= min(pool.count, pool.gpus_per_node)
            for hosting, pool in zip(own, pools, strict=True)
        ):
            least = min(hosting.num_gpus for hosting in own)
            problems.append(f"{name}: needs {least} GPUs of one kind in one node; no node has as many")
    return problems


def _whole(pool: Pool, deployment: Deployment) -> Pool:
    """Returns the pool with the whole memory of its GPUs available to weights."""
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
    """Returns the config node of a choice, for hardware also that of its calibration."""
    overrides = [f"{group}={name}"] + ([f"model.weights={weights}"] if weights else [])
    try:
        cfg = resolved(composed(source, overrides))
    except ConfigError as error:
        raise _located(error, group, entry, f"{entry}.name={name}") from error
    keys = ("hardware", "calibration") if group == "hardware" else (group,)
    return {key: cfg[key] for key in keys}


def _located(error: ConfigError, group: str, entry: str, whole: str) -> ConfigError:
    """Returns the error with the user's key: model=x becomes models[0].name=x; else `whole` precedes it."""
    text = str(error)
    for own, theirs in ((f"{group}=", f"{entry}.name="), ("model.weights=", f"{entry}.weights=")):
        if text.startswith(own):
            return ConfigError(f"{theirs}{text.removeprefix(own)}")
    return ConfigError(f"{whole}: {text}")


def _deployment(settings: PlaceSettings, parts: dict[str, Any]) -> Deployment:
    own = {name: getattr(settings, name) for name in ("scheduling", "caching", "latency")}
    own |= with_limits(settings.nodes, parts["hardware"])
    deployment: Deployment = build_as(Deployment, {**parts, **own}, "")
    return deployment
