"""From an experiment's overrides to the config of every run, checked before anything runs.

Each arm is composed as `windtunnel simulate` would compose it: base, also, the arm's own, the swept value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from experiments.compare.settings import CompareSettings, Metric
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import find_groups
from sim.settings.convert import shown
from sim.settings.errors import ConfigError, suggest
from sim.settings.hydra_errors import composed
from sim.settings.scenario import build_run
from sim.setup.pool import PoolSettings
from sim.setup.scenario import Scenario


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """An arm at one swept value (None without a sweep): the runs of all seeds differ by their seed alone."""

    arm: str
    swept: Any
    config: dict[str, Any]
    """Of `simulate`, interpolations as they are written."""

    def with_seed(self, seed: int) -> dict[str, Any]:
        return {**self.config, "seed": seed}


def points(settings: CompareSettings, source: ConfigSource) -> list[Point]:
    """Every arm at every swept value, composed and built once. Raises ConfigError, which names the arm."""
    experiment, found = settings.experiment, []
    for arm in experiment.arms:
        for i, cfg in enumerate(_composed(settings, source, arm)):
            value = experiment.swept[i]
            where = f"arm {arm}" + (f" at {experiment.sweep.key}={shown(value)}" if experiment.sweep else "")
            cfg.seed = experiment.seeds[0]
            try:
                scenario, _ = build_run(cfg)
                if i == 0:
                    _check_metrics(scenario, experiment.metrics)
            except ConfigError as error:
                raise ConfigError(f"{where}: {error}") from error
            config: Any = OmegaConf.to_container(cfg)
            found.append(Point(arm=arm, swept=value, config=config))
    _check_traffic(found, settings)
    return found


def settings_that_differ(found: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """Dotted key -> arm -> value, for every setting that is not the same in all arms, at one swept value."""
    leaves = {point.arm: dict(_leaves(_resolved(point.config))) for point in found}
    keys = dict.fromkeys(key for of_arm in leaves.values() for key in of_arm)
    rows = {key: {arm: of_arm.get(key, "–") for arm, of_arm in leaves.items()} for key in keys}
    return {key: row for key, row in rows.items() if len({_text(value) for value in row.values()}) > 1}


def _composed(settings: CompareSettings, source: ConfigSource, arm: str) -> Iterator[DictConfig]:
    """The arm's config at each swept value, in order.

    Composing takes 0.2 s, so a setting is then changed in place; a choice of a group is composed anew, and
    what pools take over from the root.
    """
    experiment = settings.experiment
    own = [*experiment.base, *settings.also, *experiment.arms[arm]]
    sweep = experiment.sweep
    if sweep is None:
        yield _compose(source, own, arm)
        return
    first = _compose(source, [*own, f"{sweep.key}={shown(sweep.values[0])}"], arm)
    yield first
    key = sweep.key.lstrip("+")
    is_inherited = bool(first.pools) and key.partition(".")[0] in (
        *PoolSettings.__dataclass_fields__,
        "pools",
    )
    for value in sweep.values[1:]:
        if key in find_groups(source.dirs) or is_inherited:
            yield _compose(source, [*own, f"{sweep.key}={shown(value)}"], arm)
            continue
        changed = first.copy()
        with open_dict(changed):
            OmegaConf.update(changed, key, value)
        yield changed


def _compose(source: ConfigSource, overrides: Sequence[str], arm: str) -> DictConfig:
    try:
        return composed(source, overrides)
    except ConfigError as error:
        raise ConfigError(f"arm {arm}: {error}") from error


def _check_metrics(scenario: Scenario, metrics: Sequence[Metric]) -> None:
    """Every metric must be a figure of summary.json: a run that ends at once has them all."""
    known = known_figures(scenario)
    for i, metric in enumerate(metrics):
        if metric.key not in known:
            section = metric.key.partition(".")[0]
            allowed = [name for name in known if name.startswith(f"{section}.")] or list(
                dict.fromkeys(name.partition(".")[0] for name in known)
            )
            missing = " with slo=none" if section == "goodput" and scenario.slo is None else ""
            raise ConfigError(
                f"experiment.metrics[{i}].key={metric.key}: no such figure in summary.json{missing}; "
                f"{suggest(metric.key, allowed, also=known)}"
            )


def known_figures(scenario: Scenario) -> dict[str, float]:
    """What `figures` has of its runs."""
    at_once = replace(scenario, sim=replace(scenario.sim, until_s=1e-9))
    return figures(at_once.run().summary)


def figures(summary: dict[str, Any]) -> dict[str, float]:
    """The numbers of a summary by dotted key; NaN where a figure does not exist, 0 or 1 for false or true.

    Texts and lists are left out, and so is a whole section that does not exist, and what one run alone says
    of its own noise: that is known here, from several.
    """
    of_runs = {key: value for key, value in summary.items() if key != "intervals"}
    leaves = ((key, value) for key, value in _leaves(of_runs) if "." in key or value is not None)
    return {
        key: float("nan") if value is None else float(value)
        for key, value in leaves
        if value is None or isinstance(value, bool | int | float)
    }


def _check_traffic(found: Sequence[Point], settings: CompareSettings) -> None:
    """Arms are paired by seed, so at each swept value all of them must get the same traffic."""
    baseline = settings.experiment.baseline
    for point in found:
        other = next(p for p in found if p.arm == baseline and p.swept == point.swept)
        mine, its = (dict(_leaves(_resolved(p.config)["workload"], "workload.")) for p in (point, other))
        mine["load"], its["load"] = point.config["load"], other.config["load"]
        for key in [*mine, *its]:
            value, wanted = mine.get(key, "not there"), its.get(key, "not there")
            if _text(value) != _text(wanted):
                raise ConfigError(
                    f"arm {point.arm}: {key}={shown(value)}: must be {shown(wanted)} as in arm {baseline}; "
                    "arms are compared on the same traffic (set it in base, or sweep it)"
                )


def _resolved(config: dict[str, Any]) -> Any:
    try:
        return OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error


def _leaves(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and what stands under them; a list is one value."""
    for key, value in node.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
