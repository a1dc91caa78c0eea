"""From the settings to the candidates: each composed, built and held against its bounds before any runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from omegaconf import DictConfig, OmegaConf

from experiments.capacity.settings import AS_SET, CapacitySettings, Entry
from sim.availability import availability, replicas_for
from sim.metrics.slo import Slo
from sim.scenario import Scenario
from sim.settings.build import build_as
from sim.settings.compose import ConfigSource
from sim.settings.convert import shown
from sim.settings.errors import ConfigError
from sim.settings.hydra_errors import composed
from sim.settings.scenario import build_scenario
from sim.settings.variants import Variants

NODE = "capacity"
SEARCHED = {"load": "capacity.headroom and capacity.growth_per_month", "replicas": "capacity.max_replicas"}
"""Settings that are varied, and where their range is set."""
NONE = ("pools", "scaling", "troubles")
"""Groups that must be none: fleets of replicas all alike, all the time, are planned."""
SIZES = ("hardware", "TP", "PP")
"""Axes whose entries some models do not allow: such a candidate is left out, and no mistake of the user."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One replica's settings; how many of them are needed is what is looked for."""

    name: str
    parts: Mapping[str, str]
    """Its label on each axis."""
    overrides: tuple[str, ...]
    """Of `simulate`, besides those of the command line."""
    scenario: Scenario
    """With one replica."""
    asked: Mapping[str, str | None]
    """Of the model's number formats, what was set: weights, moe_weights, kv_cache_dtype; else None."""

    @property
    def usd_per_hour(self) -> float:
        """Of one replica."""
        return self.scenario.price_usd_per_hour

    @property
    def num_devices(self) -> int:
        """Of one replica."""
        return self.scenario.layout.num_devices

    def deployed(self, num_up: int, settings: CapacitySettings) -> int:
        """Replicas to rent so that num_up are up, whatever may fail."""
        with_spares = num_up + settings.spare
        if settings.availability is None:
            return with_spares
        up_share = availability(settings.mtbf_hours * 3600 / self.num_devices, settings.mttr_hours * 3600)
        return max(with_spares, replicas_for(num_up, up_share, settings.availability, most=10 * num_up + 100))


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """A combination that cannot be built, or does not fit into memory."""

    name: str
    parts: Mapping[str, str]
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """All that is asked."""

    settings: CapacitySettings
    slo: Slo
    candidates: tuple[Candidate, ...]
    refused: tuple[Refused, ...]
    base: tuple[str, ...]
    """Overrides of the command line that all candidates have."""
    source: ConfigSource
    """Of `simulate`."""


def build_question(cfg: DictConfig, source: ConfigSource, overrides: Sequence[str]) -> Question:
    """overrides: of the command line, those of the search among them. Raises ConfigError."""
    settings: CapacitySettings = build_as(CapacitySettings, cfg[NODE], NODE)
    simulate = ConfigSource(config_name="simulate", dirs=source.dirs)
    base = [override for override in overrides if not override.lstrip("+~").startswith(f"{NODE}.")]
    _check_base(composed(simulate, base))
    candidates, refused = build_candidates(settings, Variants(simulate, base))
    if not candidates:
        reasons = "; ".join(f"{one.name or 'as set'}: {one.reason}" for one in refused[:2])
        raise ConfigError(f"{NODE}: no candidate can be built ({reasons})")
    slo = candidates[0].scenario.slo
    assert slo is not None
    for candidate in candidates:
        for key in ("slo", "workload"):
            if getattr(candidate.scenario, key) != getattr(candidates[0].scenario, key):
                raise ConfigError(
                    f"{NODE}.more: {candidate.name}: all candidates must have one {key} in common"
                )
    _check_demand(candidates, settings)
    return Question(
        settings=settings,
        slo=slo,
        candidates=tuple(candidates),
        refused=tuple(refused),
        base=tuple(base),
        source=simulate,
    )


def build_candidates(settings: CapacitySettings, variants: Variants) -> tuple[list[Candidate], list[Refused]]:
    """All combinations; those that cannot be are refused. Raises ConfigError for an entry that never can."""
    axes = settings.axes
    candidates, refused = list[Candidate](), list[Refused]()
    built: set[str] = set()
    errors: dict[str, str] = {}
    for combination in product(*axes.values()):
        entries = dict(zip(axes, combination, strict=True))
        name = name_of(entries, axes)
        parts = {axis: entry.label for axis, entry in entries.items()}
        own = tuple(override for entry in combination for override in entry.overrides)
        cfg = _composed(variants, combination, own)
        try:
            scenario = build_scenario(cfg)
        except ConfigError as error:
            for entry in combination:
                errors.setdefault(entry.where, str(error))
            refused.append(Refused(name=name, parts=parts, reason=str(error)))
            continue
        built.update(entry.where for entry in combination)
        try:
            scenario.plan_memory()
            scenario.iteration_model()
        except ValueError as error:
            refused.append(Refused(name=name, parts=parts, reason=str(error)))
            continue
        candidates.append(
            Candidate(
                name=name, parts=parts, overrides=own, scenario=scenario, asked=_asked_formats(cfg.model)
            )
        )
    for axis, entries_of_axis in axes.items():
        for entry in entries_of_axis:
            if axis not in SIZES and entry.where not in built and entry.where in errors:
                raise ConfigError(f"{NODE}.{entry.where}: {errors[entry.where]}")
    return candidates, refused


def name_of(entries: Mapping[str, Entry], axes: Mapping[str, Sequence[Entry]]) -> str:
    """The labels of all axes on which candidates differ."""
    varied = [entry.label for axis, entry in entries.items() if len(axes[axis]) > 1 or axis == "hardware"]
    return " ".join(filter(None, varied)) or AS_SET


def _asked_formats(model: DictConfig) -> dict[str, str | None]:
    found = {key: model.get(key) for key in ("weights", "moe_weights", "kv_cache_dtype")}
    return {key: None if value in (None, "auto") else str(value) for key, value in found.items()}


def _composed(variants: Variants, combination: Sequence[Entry], own: Sequence[str]) -> DictConfig:
    """The config; an error of composing is the user's, and says where it was written."""
    try:
        return variants.config(own)
    except ConfigError as error:
        for entry in combination:
            try:
                variants.config(entry.overrides)
            except ConfigError as alone:
                raise ConfigError(f"{NODE}.{entry.where}: {alone}") from alone
        raise ConfigError(f"{NODE}: {' '.join(own)}: {error}") from error


def _check_demand(candidates: Sequence[Candidate], settings: CapacitySettings) -> None:
    """Raise ConfigError for traffic without a rate of its own, and for spares that are never enough."""
    try:
        source = candidates[0].scenario.source()
        for candidate in candidates:
            candidate.deployed(1, settings)
    except (ValueError, OSError) as error:
        where = f"{NODE}." if str(error).startswith("wanted_share") else ""
        raise ConfigError(f"{where}{str(error).replace('wanted_share', 'availability', 1)}") from error
    if not source.num_requests or not source.last_arrival_s:
        raise ConfigError(
            "workload: its requests wait for answers, or come all at once, so that no number of replicas is "
            "too small; choose an open loop, such as workload=poisson"
        )


def _check_base(cfg: DictConfig) -> None:
    """Raise ConfigError for settings that are looked for, or of fleets that are not planned."""
    if not cfg.slo:
        raise ConfigError("slo=none: capacity is what keeps an SLO; choose one, such as slo=chat")
    for key, where in SEARCHED.items():
        if cfg[key] != 1:
            raise ConfigError(f"{key}={shown(cfg[key])}: is what is varied; leave it at 1, see {where}")
    for key in NONE:
        node: Any = OmegaConf.to_container(cfg[key]) if OmegaConf.is_config(cfg[key]) else cfg[key]
        is_none = not node or (key == "troubles" and not node.get("events"))
        if not is_none:
            raise ConfigError(f"{key}: must be none, as replicas all alike and always there are planned")
    if not str(cfg.layout.get("_target_", "")).endswith("AsSet"):
        raise ConfigError(
            "layout: must be as_set; name sizes to try in capacity.tensor_parallel_sizes, or leave them out"
        )
