"""Settings of `windtunnel compare`: arms on the same traffic, metrics, and expected ratios."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from experiments.study.figures import Metric
from experiments.study.override_lines import check_reserved, check_whole
from experiments.study.seeds import check_seeds
from experiments.study.settings import StudySettings, check_num_runs, settings_of
from fieldlimits import Checked, Positive, PositiveInt, check
from sim.settings.build import TARGET, build, build_as
from sim.settings.errors import suggest

RESERVED = {
    "seed": "the list of seeds sets them",
    "output": "a comparison writes its own files",
    "hydra": "it applies to single runs only",
}
"""Keys of `simulate` that no arm may set -> the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """Setting that takes several values in every arm, the x axis of the figures."""

    key: str
    values: tuple[Any, ...]
    label: str | None = None
    """Title of the axis; None: the key."""

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("values=[]: must contain at least one value")
        for value in self.values:
            if isinstance(value, dict | list):
                raise ValueError(f"values={value}: must be plain values, numbers or names")
        if len(set(map(str, self.values))) < len(self.values):
            raise ValueError(f"values={list(self.values)}: must all be different")
        check_reserved("key", [self.key], RESERVED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation(Checked):
    """Ratio of a metric between two arms, as the claim predicts it."""

    metric: str
    arm: str
    over: str | None = None
    """Other arm; None: the baseline."""
    at: Any = None
    """Swept value at which it must hold; None: at every value."""
    at_least_ratio: Positive | None = None
    at_most_ratio: Positive | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.at_least_ratio is None and self.at_most_ratio is None:
            raise ValueError("at_least_ratio=null, at_most_ratio=null: at least one must be set")


@dataclass(frozen=True, kw_only=True, slots=True)
class Experiment:
    """Settings of one experiment, configs/experiment/*.yaml."""

    title: str
    claim: str
    """Claim that is tested, in one sentence."""
    arms: Mapping[str, tuple[str, ...]]
    """Name -> overrides, as on the command line of `simulate`."""
    baseline: str
    """Arm that the others are compared with."""
    metrics: tuple[Metric, ...]
    source: str = ""
    """Source of the claim, such as a paper."""
    base: tuple[str, ...] = ()
    """Overrides of every arm, before its own."""
    sweep: Sweep | None = None
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    expect: tuple[Expectation, ...] = ()

    def __post_init__(self) -> None:
        if len(self.arms) < 2:
            raise ValueError(f"arms={list(self.arms)}: must be two or more, to be compared")
        _check_known("baseline", self.baseline, self.arms)
        if not self.metrics:
            raise ValueError("metrics=[]: must contain a metric, such as {key: ttft.p99_s, better: lower}")
        keys = [metric.key for metric in self.metrics]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"metrics={key}: must be named once")
        check_seeds(self.seeds, "five")
        _check_overrides("base", self.base)
        for arm, overrides in self.arms.items():
            _check_overrides(f"arms.{arm}", overrides)
        for i, expectation in enumerate(self.expect):
            self._check_expectation(f"expect[{i}]", expectation)
        check_num_runs(self.num_runs, "seeds", len(self.seeds), "arms, swept values and seeds")

    @property
    def swept(self) -> tuple[Any, ...]:
        """Swept values; a single None without a sweep."""
        return self.sweep.values if self.sweep else (None,)

    @property
    def num_runs(self) -> int:
        return len(self.arms) * len(self.swept) * len(self.seeds)

    def metric(self, key: str) -> Metric:
        return next(metric for metric in self.metrics if metric.key == key)

    def _check_expectation(self, name: str, expectation: Expectation) -> None:
        over = expectation.over or self.baseline
        _check_known(f"{name}.arm", expectation.arm, self.arms)
        _check_known(f"{name}.over", over, self.arms)
        _check_known(f"{name}.metric", expectation.metric, [metric.key for metric in self.metrics])
        if expectation.arm == over:
            raise ValueError(f"{name}.arm={over}: must not be the arm that it is compared with")
        if expectation.at is not None and expectation.at not in self.swept:
            if not self.sweep:
                raise ValueError(f"{name}.at={expectation.at}: needs a sweep; leave it out")
            values = ", ".join(map(str, self.swept))
            raise ValueError(f"{name}.at={expectation.at}: must be one of the swept values {values}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareSettings(StudySettings):
    """Settings of `windtunnel compare`."""

    experiment: Experiment
    also: tuple[str, ...] = ()
    """Overrides of every arm, after the experiment's base and before the arm's own."""
    jobs: Annotated[PositiveInt | None, "null for one per core"] = None

    def __post_init__(self) -> None:
        check(self)
        _check_overrides("also", self.also)


def build_settings(cfg: dict[str, Any]) -> CompareSettings:
    """Builds the settings. Raises ConfigError for a wrong one; the arms' overrides are not checked here."""
    node = cfg.get("experiment")
    own = {**cfg, "experiment": _build_experiment(dict(node))} if isinstance(node, Mapping) else cfg
    return settings_of(CompareSettings, own, "")


def _build_experiment(node: dict[str, Any]) -> Any:
    """Builds an experiment; its parts first."""
    own = {**node, **built_parts(node, "experiment")}
    return build({TARGET: f"{Experiment.__module__}.{Experiment.__name__}", **own}, "experiment")


def built_parts(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Builds the metrics, expectations and the sweep of a node, whose types follow from their place.

    key: of the node. Raises ConfigError.
    """
    found: dict[str, Any] = {}
    for name, kind in (("metrics", Metric), ("expect", Expectation)):
        if isinstance(node.get(name), list):
            parts = enumerate(node[name])
            found[name] = [build_as(kind, part, f"{key}.{name}[{i}]") for i, part in parts]
    if node.get("sweep") is not None:
        found["sweep"] = build_as(Sweep, node["sweep"], f"{key}.sweep")
    return found


def _check_known(name: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value}: is not in the experiment; {suggest(value, known)}")


def _check_overrides(name: str, overrides: Iterable[str]) -> None:
    for override in overrides:
        check_whole(name, [override])
        check_reserved(name, [override], RESERVED)
