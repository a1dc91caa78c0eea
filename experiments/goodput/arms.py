"""Composes the arms of a search from the settings, and builds each once before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.app.settings.compose import Composition, ConfigSource, resolved
from experiments.app.settings.override import not_about
from experiments.app.settings.variants import Variants
from experiments.goodput.search import Arm, rate_of
from experiments.goodput.settings import RESERVED, GoodputSettings
from experiments.study.override_lines import check_base
from experiments.study.settings import LAUNCHER, settings_of
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run, build_scenario
from sim.workload.base import BeginsByRate, Source

NODE = "goodput"


def build_arms(cfg: dict[str, Any], composition: Composition) -> tuple[GoodputSettings, list[Arm]]:
    """Builds the settings and the arms.

    Raises ConfigError for a wrong setting, and for a workload without a request rate.
    """
    settings = settings_of(GoodputSettings, cfg, NODE)
    base = not_about(composition.overrides, NODE, LAUNCHER)
    check_base(base, RESERVED)
    variants = Variants(ConfigSource(config_name="simulate", dirs=composition.source.dirs), base)
    arms = []
    for i, (name, own) in enumerate(settings.overrides_by_arm.items()):
        try:
            arms.append(_arm(name, variants, own, settings, composition.objects.get(name, {})))
        except ConfigError as error:
            raise ConfigError(f"{NODE}.arms[{i}]: {error}" if settings.arms else str(error)) from error
    return settings, arms


def _arm(
    name: str, variants: Variants, own: Sequence[str], settings: GoodputSettings, objects: Mapping[str, Any]
) -> Arm:
    config = variants.config(own, seed=settings.seeds[0])
    config["sim"]["stop_overloaded"] = True
    first = resolved(config)
    scenario, traffic = build_run(first, objects)
    if scenario.slo is None:
        raise ConfigError("slo=none: goodput counts requests that meet an SLO; choose one, such as slo=chat")
    base_rate = rate_of(traffic)
    if base_rate is None or traffic.num_requests is None:
        raise ConfigError(
            "workload: has no request rate that could be varied (a closed loop, or all requests at once); "
            "choose an open loop, such as workload=poisson"
        )
    scenarios = {
        seed: build_scenario(resolved({**config, "seed": seed}), objects) for seed in settings.seeds[1:]
    }
    is_trimmed = bool(scenario.metrics.warmup_s or scenario.metrics.cooldown_s)
    return Arm(
        name=name,
        scenarios={settings.seeds[0]: scenario, **scenarios},
        slo=scenario.slo,
        target=scenario.slo.attainment_target if settings.target is None else settings.target,
        base_rate=base_rate,
        num_devices=sum(pool.replicas * pool.layout.num_devices for pool in scenario.pools_by_name.values()),
        warmup_share=None if is_trimmed else settings.warmup_share,
        slo_scales=settings.slo_scales,
        num_requests=traffic.num_requests,
        max_requests=settings.max_requests,
        requests_per_session=_requests_per_session(traffic),
    )


def _requests_per_session(traffic: Source) -> float | None:
    """Returns the mean number of requests of a session; None for requests that arrive one by one."""
    if not isinstance(traffic, BeginsByRate) or traffic.num_requests is None:
        return None
    return traffic.num_requests / max(sum(1 for _ in traffic.arrivals()), 1)
