"""Composes the config of every run from an experiment's overrides, and checks all before anything runs.

An arm has the config of `windtunnel simulate` with these overrides in order: base, also, the arm's own, and
the swept value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import find_groups
from experiments.app.settings.hydra_errors import composed
from experiments.app.settings.override import Override
from experiments.app.settings.variants import Variants
from experiments.compare.settings import CompareSettings
from experiments.study.figures import as_text, check_metrics, leaves
from experiments.study.runs import Point
from sim.settings.build import shown
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run


def points(
    settings: CompareSettings,
    source: ConfigSource,
    objects: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> list[Point]:
    """Composes and builds every arm at every swept value. Raises ConfigError, which names the arm.

    objects: see `Composition`.
    """
    experiment, found = settings.experiment, []
    _check_choices("experiment.base", experiment.base, source)
    _check_choices("also", settings.also, source)
    for arm, given in objects.items():
        if "workload" in given:
            raise ConfigError(
                f"arm {arm}: workload={type(given['workload']).__name__}: must not be an object, because the "
                "arms are compared on one traffic; write a config for it, and choose that for all"
            )
    variants = Variants(source, [*experiment.base, *settings.also])
    for arm, own in experiment.arms.items():
        for i, value in enumerate(experiment.swept):
            at = f"{experiment.sweep.key}={shown(value)}" if experiment.sweep else ""
            try:
                config = variants.config([*own, at] if at else own, seed=experiment.seeds[0])
            except ConfigError as error:
                raise ConfigError(f"arm {arm}: {error}") from error
            try:
                scenario, _ = build_run(resolved(config), objects.get(arm, {}))
                if i == 0:
                    check_metrics(scenario, experiment.metrics, "experiment.metrics")
            except ConfigError as error:
                where = f"arm {arm} at {at}" if at else f"arm {arm}"
                raise ConfigError(f"{where}: {error}") from error
            found.append(Point(arm=arm, swept=value, config=config, objects=objects.get(arm, {})))
    _check_traffic(found, settings)
    return found


def _check_choices(name: str, overrides: Sequence[str], source: ConfigSource) -> None:
    """Raises ConfigError for a choice that does not exist, which an arm's own choice would conceal."""
    groups = find_groups(source.dirs)
    for override in map(Override.parse, overrides):
        if override.is_deleted or override.key not in groups:
            continue
        if override.value not in [c.name for c in groups[override.key]]:
            try:
                composed(source, [override.text])  # there are other values, such as quoted ones
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error


def _check_traffic(found: Sequence[Point], settings: CompareSettings) -> None:
    """Checks that all arms have the same traffic at each swept value, because they are paired by seed.

    Raises ConfigError, which names the arm and the setting.
    """
    baseline = settings.experiment.baseline
    for point in found:
        other = next(p for p in found if p.arm == baseline and p.swept == point.swept)
        mine, its = (dict(leaves(resolved(p.config)["workload"], "workload.")) for p in (point, other))
        mine["load"], its["load"] = point.config["load"], other.config["load"]
        for key in [*mine, *its]:
            value, wanted = mine.get(key, "unset"), its.get(key, "unset")
            if as_text(value) != as_text(wanted):
                raise ConfigError(
                    f"arm {point.arm}: {key}={shown(value)}: must be {shown(wanted)} as in arm {baseline}, "
                    "because arms are compared on the same traffic; set it in base, or sweep it"
                )
