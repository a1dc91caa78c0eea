"""Runs an arm of a shipped comparison with further settings, for rows that no comparison gives as a ratio."""

from __future__ import annotations

from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.app.settings.variants import Variants
from experiments.reproduce.tasks import experiment_of
from experiments.study.figures import figures
from experiments.study.workers import simulate_config
from sim.metrics.result import RunResult


def summary(name: str, arm: str, *more: str, seed: int = 0) -> dict[str, float]:
    """Returns the figures of an arm's run by dotted key. more: settings after those of the arm."""
    return figures(result(name, arm, *more, seed=seed).summary)


def result(name: str, arm: str, *more: str, seed: int = 0) -> RunResult:
    """Returns the result of an arm's run. more: settings after those of the arm."""
    shipped = experiment_of(name, [CONFIG_DIR])
    variants = Variants(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]), shipped.base)
    return simulate_config(variants.config([*shipped.arms[arm], *more], seed=seed))


def run_result(*settings: str, seed: int = 0) -> RunResult:
    """Returns the result of a run with these settings of `windtunnel simulate`."""
    variants = Variants(ConfigSource(config_name="simulate", dirs=[CONFIG_DIR]))
    return simulate_config(variants.config(list(settings), seed=seed))


def run_summary(*settings: str) -> dict[str, float]:
    """Returns the figures of a run with these settings of `windtunnel simulate` by dotted key."""
    return figures(run_result(*settings).summary)
