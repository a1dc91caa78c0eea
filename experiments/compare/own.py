"""Arms of one's own for `windtunnel compare`: overrides of the scenario that the command line describes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from experiments.app.settings.compose import Composition, ConfigSource, resolved
from experiments.app.settings.override import not_about
from experiments.app.settings.variants import Variants
from experiments.compare.arms import points
from experiments.compare.command import comparison
from experiments.compare.settings import RESERVED as OF_EXPERIMENTS
from experiments.compare.settings import CompareSettings, Experiment, Sweep, built_parts
from experiments.compare.whatif.arms import METRICS
from experiments.study.figures import Metric, known_figures
from experiments.study.override_lines import by_name, check_base, check_lines
from experiments.study.settings import LAUNCHER, StudySettings, settings_of
from experiments.study.study import StudyJob
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run

NODE = "compare"
RESERVED = {**OF_EXPERIMENTS, "seed": f"{NODE}.seeds sets the seeds"}
"""Keys that neither the command line nor an arm may set -> the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnSettings(StudySettings):
    """Node `compare` of configs/compare_own.yaml; the rest of the config is the scenario of all arms."""

    arms: tuple[str, ...] = ()
    """Overrides of each arm, separated by spaces.

    A name before a colon is optional; without one, an arm is named by its overrides.
    """
    baseline: str | None = None
    """Arm that the others are compared with; None: the first."""
    metrics: tuple[Metric, ...] = ()
    """Figures to compare; (): `METRICS`, as far as the scenario has them."""
    sweep: Sweep | None = None
    """Setting that takes several values in every arm; None: none."""
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)

    def __post_init__(self) -> None:
        if len(self.arms) < 2:
            raise ValueError(
                f"arms={list(self.arms)}: must be two or more, such as "
                "arms=['vllm: engine=vllm','static: batching=static']"
            )
        check_lines("arms", self.arms, RESERVED)


def prepare(cfg: dict[str, Any], composition: Composition) -> StudyJob:
    """Composes and builds every arm. Raises ConfigError for a wrong setting."""
    own = settings_of(OwnSettings, cfg, NODE, **built_parts(cfg[NODE], NODE))
    base = not_about(composition.overrides, NODE, LAUNCHER, "hydra")
    check_base(base, RESERVED)
    simulate = ConfigSource(config_name="simulate", dirs=composition.source.dirs)
    arms = dict(by_name(own.arms))
    try:
        experiment = Experiment(
            title="Arms of one's own",
            claim="The arms are compared on the same traffic.",
            arms=arms,
            baseline=own.baseline or next(iter(arms)),
            base=tuple(base),
            metrics=own.metrics or _usual_metrics(simulate, base, own.seeds),
            sweep=own.sweep,
            seeds=own.seeds,
        )
    except ValueError as error:
        raise ConfigError(f"{NODE}.{error}") from error
    settings = CompareSettings(
        experiment=experiment,
        jobs=own.jobs,
        report=own.report,
        progress=own.progress,
        launcher=own.launcher,
    )
    return comparison(cfg, settings, points(settings, simulate, composition.objects))


def _usual_metrics(source: ConfigSource, words: Sequence[str], seeds: Sequence[int]) -> tuple[Metric, ...]:
    """Returns the metrics that the scenario has figures of."""
    scenario, _ = build_run(resolved(Variants(source, words).config([], seed=seeds[0])))
    known = known_figures(scenario)
    return tuple(metric for metric in METRICS if metric.key in known)
