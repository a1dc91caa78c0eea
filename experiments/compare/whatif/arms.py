"""Composes the configs of the baseline and of each change, and builds all of them before anything runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from experiments.app.settings.bounded_yaml import read_yaml
from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import find_groups
from experiments.app.settings.override import Override, not_about
from experiments.app.settings.variants import Variants
from experiments.compare.settings import Experiment
from experiments.compare.whatif.offered import OFFERED, Baseline, Change, DoesNotApply
from experiments.compare.whatif.settings import BASELINE, RESERVED, WhatifSettings
from experiments.study.figures import Metric, as_text, known_figures
from experiments.study.override_lines import by_name, line_of
from experiments.study.request_limit import limiting_override
from experiments.study.runs import Point
from experiments.study.settings import LAUNCHER, settings_of
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run
from sim.setup.scenario import Scenario
from sim.workload.base import Source

NODE = "whatif"
METRICS = (
    Metric(key="goodput.share", better="higher", label="SLO attainment"),
    Metric(key="goodput.requests_per_s", better="higher", label="goodput, requests/s"),
    Metric(key="ttft.p50_s", better="lower"),
    Metric(key="ttft.p99_s", better="lower"),
    Metric(key="tpot.p99_s", better="lower"),
    Metric(key="throughput.output_tokens_per_s", better="higher", label="output tokens/s"),
    Metric(key="cost.usd_per_hour", better="lower", label="$/hour"),
    Metric(key="cost.usd_per_million_output_tokens", better="lower", label="$ per M output tokens"),
    Metric(key="energy.joules_per_output_token", better="lower", label="J per output token"),
)
"""Metrics; those that the baseline does not have are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Questions:
    """Baseline and changes, composed and built."""

    settings: WhatifSettings
    experiment: Experiment
    """Experiment whose arms are the baseline and the changes."""
    points: Sequence[Point]
    targets: dict[str, float]
    """Arm -> attainment target of its SLO; arms without an SLO are left out."""
    left_out: dict[str, str]
    """Offered change that does not apply to the baseline -> the reason."""
    other_traffic: Sequence[str]
    """Changes of the workload itself."""
    num_requests: int | None
    """Requests to which each run of the baseline was limited; None: it was not."""
    arrivals: Mapping[str, tuple[int, float]]
    """Arm -> its requests with the first seed, and the time of the last arrival in seconds.

    Arms whose traffic has no request rate are left out.
    """


def build_questions(cfg: dict[str, Any], source: ConfigSource, overrides: Sequence[str]) -> Questions:
    """Builds the baseline and the changes. overrides: all overrides of the command line.

    Raises ConfigError for a wrong setting, and if no change applies.
    """
    settings = settings_of(WhatifSettings, cfg, NODE)
    simulate = ConfigSource(config_name="simulate", dirs=source.dirs)
    own = not_about(overrides, NODE, LAUNCHER)
    _refuse_seed(own)
    builder = _ArmBuilder(settings, simulate, own)
    scenario, traffic = builder.add(Change(BASELINE, ()))
    left_out: dict[str, str] = {}
    if settings.changes:
        for i, (name, words) in enumerate(by_name(settings.changes).items()):
            try:
                builder.add(Change(name, words))
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
                builder.add(change)
            except ConfigError as error:
                left_out[name] = str(error)
        if len(builder.points) == 1:
            reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
            raise ConfigError(
                f"{NODE}.offered: no change applies to the baseline ({reasons}); name one, such as "
                f"{NODE}.changes=['double the traffic: load=2']"
            )
    known = known_figures(scenario)
    workload = as_text(builder.configs[BASELINE]["workload"])
    return Questions(
        settings=settings,
        experiment=Experiment(
            title="What if",
            claim="Each change is compared alone with the baseline.",
            arms=builder.overrides,
            baseline=BASELINE,
            metrics=tuple(metric for metric in METRICS if metric.key in known),
            seeds=settings.seeds,
        ),
        points=builder.points,
        targets=builder.targets,
        left_out=left_out,
        other_traffic=[
            name for name, config in builder.configs.items() if as_text(config["workload"]) != workload
        ],
        num_requests=builder.num_requests,
        arrivals=builder.arrivals,
    )


def _refuse_seed(overrides: Sequence[str]) -> None:
    """Raises ConfigError if the command line sets `seed`, which would have no effect."""
    for override in map(Override.parse, overrides):
        if override.root == "seed":
            given = override.text.removeprefix(override.prefix)
            raise ConfigError(
                f"{given}: must not be set here; {RESERVED['seed']}, such as "
                f"{NODE}.seeds=[{override.value or 0}]"
            )


class _ArmBuilder:
    """Builder of arms, which also collects their configs and SLO targets."""

    def __init__(self, settings: WhatifSettings, source: ConfigSource, overrides: Sequence[str]) -> None:
        self._settings = settings
        self._overrides = overrides
        self._variants = Variants(source, overrides)
        self.points: list[Point] = []
        self.configs: dict[str, dict[str, Any]] = {}
        self.overrides: dict[str, tuple[str, ...]] = {}
        self.targets: dict[str, float] = {}
        self.num_requests: int | None = None
        self.arrivals: dict[str, tuple[int, float]] = {}

    def add(self, change: Change) -> tuple[Scenario, Source]:
        """Adds an arm; returns its scenario and traffic. Raises ConfigError, which names the change."""
        name, words = change
        try:
            config = self._variants.config(words)
            if config["sim"]["stop_overloaded"]:
                raise ConfigError(
                    "sim.stop_overloaded=true: must be false, because a run that ends early has not the same "
                    "traffic as the others; to shorten all runs, set whatif.requests"
                )
            limit = limiting_override(config, [*self._overrides, *words], self._settings.requests)
            limited = [*words, limit] if limit else words
            config = self._variants.config(limited, seed=self._settings.seeds[0])
            scenario, traffic = build_run(resolved(config))
        except ConfigError as error:
            message = str(error)
            is_plain = name == BASELINE or message.startswith(f"{name}:")
            raise ConfigError(message if is_plain else f"{name}: {message}") from error
        self.points.append(Point(arm=name, swept=None, config=config))
        self.configs[name] = config
        self.overrides[name] = words
        if name == BASELINE:
            self.num_requests = self._settings.requests if limit else None
        if scenario.slo is not None:
            self.targets[name] = scenario.slo.attainment_target
        if traffic.num_requests and traffic.last_arrival_s:
            self.arrivals[name] = (traffic.num_requests, traffic.last_arrival_s)
        return scenario, traffic


def _offered(
    settings: WhatifSettings, baseline: Baseline, left_out: dict[str, str]
) -> Iterator[tuple[str, Change]]:
    """Yields the changes that apply, with their names in the settings; adds the others to `left_out`."""
    for line in settings.offered:
        if line not in OFFERED:
            change = Change(*line_of(line))
            yield change.name, change
            continue
        try:
            yield line, OFFERED[line](baseline)
        except DoesNotApply as reason:
            left_out[line] = str(reason)


def _bandwidth(source: ConfigSource, hardware: str) -> float:
    """Returns the memory bandwidth of a choice of `hardware`, in bytes/s."""
    file = next(choice.file for choice in find_groups(source.dirs)["hardware"] if choice.name == hardware)
    return float(read_yaml(file)["memory_bandwidth_bytes_per_s"])
