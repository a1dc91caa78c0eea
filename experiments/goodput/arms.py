"""From the settings to the configurations that are searched, each composed and built once before any runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.goodput.search import Arm, rate_of
from experiments.goodput.settings import RESERVED, GoodputSettings
from sim.settings.build import build_as
from sim.settings.compose import ConfigSource
from sim.settings.errors import ConfigError
from sim.settings.hydra_errors import composed
from sim.settings.scenario import build_run, build_scenario

NODE = "goodput"
LIMITS = ("num_requests", "max_requests")
"""Keys of workloads that say how many requests there are."""


def build_arms(
    cfg: DictConfig, source: ConfigSource, overrides: Sequence[str]
) -> tuple[GoodputSettings, list[Arm]]:
    """overrides: of the command line, those of the search among them. Raises ConfigError."""
    settings: GoodputSettings = build_as(GoodputSettings, cfg[NODE], NODE)
    simulate = ConfigSource(config_name="simulate", dirs=source.dirs)
    base = [override for override in overrides if not override.lstrip("+~").startswith(f"{NODE}.")]
    for override in base:
        if (root := override.lstrip("+~").partition("=")[0]) in RESERVED:
            raise ConfigError(f"{override}: must not be set here; {RESERVED[root]}")
    arms = []
    for i, (name, own) in enumerate(settings.overrides_by_arm.items()):
        try:
            arms.append(_arm(name, composed(simulate, [*base, *own]), settings))
        except ConfigError as error:
            raise ConfigError(f"{NODE}.arms[{i}]: {error}" if settings.arms else str(error)) from error
    return settings, arms


def _arm(name: str, cfg: DictConfig, settings: GoodputSettings) -> Arm:
    with open_dict(cfg):
        cfg.sim.stop_overloaded, cfg.seed = True, settings.seeds[0]
    scenario, traffic = build_run(cfg)
    if scenario.slo is None:
        raise ConfigError("slo=none: goodput is what keeps an SLO; choose one, such as slo=chat")
    base_rate = rate_of(traffic)
    if base_rate is None or traffic.num_requests is None:
        raise ConfigError(
            "workload: its requests have no rate that could be varied (users who wait for answers, or all at "
            "once); choose an open loop, such as workload=poisson"
        )
    scenarios = {settings.seeds[0]: scenario}
    for seed in settings.seeds[1:]:
        cfg.seed = seed
        scenarios[seed] = build_scenario(cfg)
    workload: Any = OmegaConf.to_container(cfg.workload, resolve=True)
    is_trimmed = bool(scenario.metrics.warmup_s or scenario.metrics.cooldown_s)
    return Arm(
        name=name,
        scenarios=scenarios,
        workload=workload,
        slo=scenario.slo,
        target=scenario.slo.attainment_target if settings.target is None else settings.target,
        base_rate=base_rate,
        num_devices=sum(pool.replicas * pool.layout.num_devices for pool in scenario.pools_by_name.values()),
        warmup_share=None if is_trimmed else settings.warmup_share,
        slo_scales=settings.slo_scales,
        limit_key=next((key for key in LIMITS if key in cfg.workload), None),
        num_requests=traffic.num_requests,
    )
