"""From the settings to the configs of the baseline and of each change, built once before any runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from experiments.compare.arms import Point, known_figures
from experiments.compare.settings import Experiment, Metric
from experiments.compare.whatif.offered import OFFERED, Baseline, Change, DoesNotApply
from experiments.compare.whatif.settings import BASELINE, RESERVED, WhatifSettings
from experiments.study.named_overrides import by_name
from sim.settings.build import build_as
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import find_groups
from sim.settings.errors import ConfigError
from sim.settings.hydra_errors import composed
from sim.settings.scenario import build_run
from sim.setup.scenario import Scenario
from sim.workload.base import Source

NODE = "whatif"
LIMITS = ("num_requests", "max_requests")
"""Keys of workloads that say how many requests there are."""

METRICS = (
    Metric(key="goodput.share", better="higher", label="in SLO"),
    Metric(key="goodput.requests_per_s", better="higher", label="goodput/s"),
    Metric(key="ttft.p50_s", better="lower"),
    Metric(key="ttft.p99_s", better="lower"),
    Metric(key="tpot.p99_s", better="lower"),
    Metric(key="throughput.output_tokens_per_s", better="higher", label="tokens/s"),
    Metric(key="cost.usd_per_hour", better="lower", label="$/hour"),
    Metric(key="cost.usd_per_million_output_tokens", better="lower", label="$/M out"),
    Metric(key="energy.joules_per_output_token", better="lower", label="J/token"),
)
"""Headline figures; those that the baseline does not have are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """What is run, all of it checked."""

    settings: WhatifSettings
    experiment: Experiment
    """The baseline and the changes as arms."""
    points: Sequence[Point]
    targets: dict[str, float]
    """By arm, the share that its SLO asks for; arms without an SLO are not in it."""
    left_out: dict[str, str]
    """Offered changes that the baseline does not admit, and why."""
    other_traffic: Sequence[str]
    """Changes of the workload itself."""
    num_requests: int | None
    """Of each run of the baseline, where it was cut to so many."""


def build_questions(cfg: DictConfig, source: ConfigSource, overrides: Sequence[str]) -> Questions:
    """overrides: of the command line, those of the command itself among them. Raises ConfigError."""
    settings: WhatifSettings = build_as(WhatifSettings, cfg[NODE], NODE)
    simulate = ConfigSource(config_name="simulate", dirs=source.dirs)
    own = [o for o in overrides if o.lstrip("+~").partition("=")[0].partition(".")[0] != NODE]
    _refuse_seed(own)
    maker = _Maker(settings, simulate, own)
    scenario, traffic = maker.add(Change(BASELINE, ()))
    left_out: dict[str, str] = {}
    if settings.changes:
        for i, (name, words) in enumerate(by_name(settings.changes).items()):
            try:
                maker.add(Change(name, words))
            except ConfigError as error:
                raise ConfigError(f"{NODE}.changes[{i}]: {error}") from error
    else:
        baseline = Baseline(
            scenario=scenario,
            source=traffic,
            bandwidth_by_gpu=lambda name: _bandwidth(simulate, name),
        )
        for name, change in _offered(settings, baseline, left_out):
            try:
                maker.add(change)
            except ConfigError as error:
                left_out[name] = str(error)
        if len(maker.points) == 1:
            reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
            raise ConfigError(
                f"{NODE}.offered: the baseline admits none of them ({reasons}); name a change, such as "
                f"{NODE}.changes=['double the traffic: load=2']"
            )
    known = known_figures(scenario)
    workload = OmegaConf.to_yaml(maker.cfgs[BASELINE].workload)
    return Questions(
        settings=settings,
        experiment=Experiment(
            title="What if",
            claim="Each change alone against the baseline.",
            arms=maker.overrides,
            baseline=BASELINE,
            metrics=tuple(metric for metric in METRICS if metric.key in known),
            seeds=settings.seeds,
        ),
        points=maker.points,
        targets=maker.targets,
        left_out=left_out,
        other_traffic=[
            name for name, cfg in maker.cfgs.items() if OmegaConf.to_yaml(cfg.workload) != workload
        ],
        num_requests=maker.num_requests,
    )


def _refuse_seed(overrides: Sequence[str]) -> None:
    """Every run gets its own: one of the command line would be without effect. Raises ConfigError."""
    for override in overrides:
        given = override.lstrip("+~")
        key, _, value = given.partition("=")
        if key == "seed":
            raise ConfigError(
                f"{given}: must not be set here; {RESERVED[key]}, such as {NODE}.seeds=[{value or 0}]"
            )


class _Maker:
    """Composes and builds arms, and keeps what the runs need."""

    def __init__(self, settings: WhatifSettings, source: ConfigSource, overrides: Sequence[str]) -> None:
        self._settings = settings
        self._source = source
        self._overrides = overrides
        self.points: list[Point] = []
        self.cfgs: dict[str, DictConfig] = {}
        self.overrides: dict[str, tuple[str, ...]] = {}
        self.targets: dict[str, float] = {}
        self.num_requests: int | None = None

    def add(self, change: Change) -> tuple[Scenario, Source]:
        """Raises ConfigError, which names the change."""
        name, words = change
        try:
            overrides = [*self._overrides, *words]
            cfg = composed(self._source, overrides)
            if cfg.sim.stop_overloaded:
                raise ConfigError(
                    "sim.stop_overloaded=true: must be false; a run that ends early is not on the same "
                    "traffic as the others; whatif.requests makes all of them shorter"
                )
            cut = self._cut(cfg, overrides)
            with open_dict(cfg):
                cfg.seed = self._settings.seeds[0]
            scenario, traffic = build_run(cfg)
        except ConfigError as error:
            told = str(error)
            is_plain = name == BASELINE or told.startswith(f"{name}:")
            raise ConfigError(told if is_plain else f"{name}: {told}") from error
        config: Any = OmegaConf.to_container(cfg)
        self.points.append(Point(arm=name, swept=None, config=config))
        self.cfgs[name] = cfg
        self.overrides[name] = words
        if name == BASELINE:
            self.num_requests = cut
        if scenario.slo is not None:
            self.targets[name] = scenario.slo.attainment_target
        return scenario, traffic

    def _cut(self, cfg: DictConfig, overrides: Sequence[str]) -> int | None:
        """No more requests than asked for, unless the workload's number was set; how many then."""
        limit = self._settings.requests
        key = next((key for key in LIMITS if key in cfg.workload), None)
        if limit is None or key is None or any(f"workload.{key}=" in o for o in overrides):
            return None
        present = cfg.workload[key]
        if present is not None and present <= limit:
            return None
        cfg.workload[key] = limit
        return limit


def _offered(
    settings: WhatifSettings, baseline: Baseline, left_out: dict[str, str]
) -> Iterator[tuple[str, Change]]:
    """Those that apply, with their name in the settings; the others go to `left_out`."""
    for line in settings.offered:
        if line not in OFFERED:
            ((name, words),) = by_name([line]).items()
            yield name, Change(name, words)
            continue
        try:
            yield line, OFFERED[line](baseline)
        except DoesNotApply as reason:
            left_out[line] = str(reason)


def _bandwidth(source: ConfigSource, hardware: str) -> float:
    """Bytes/s of a choice of `hardware`."""
    file = next(choice.file for choice in find_groups(source.dirs)["hardware"] if choice.name == hardware)
    return float(OmegaConf.load(file)["memory_bandwidth_bytes_per_s"])  # type: ignore[index]
