"""`windtunnel compare`: arms on the same traffic, intervals over seeds, and a verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from experiments.app.terminal import terminal_console
from experiments.compare.arms import points
from experiments.compare.page import write_comparison
from experiments.compare.results import Results, evaluate
from experiments.compare.sentences import verdicts
from experiments.compare.settings import CompareSettings, build_settings
from experiments.compare.tables import print_results
from experiments.study.runs import Point, Runs, run_all
from experiments.study.workers import progress_of
from sim.report.files import write_table
from sim.settings.compose import Composition, ConfigSource, running_source
from sim.settings.config_groups import CONFIG_DIR


class Comparable(NamedTuple):
    """What a comparison needs, all of it checked."""

    settings: CompareSettings
    points: list[Point]


# What was composed for the settings checked last: arms are composed once, not twice.
_checked: dict[str, Comparable] = {}


def check(cfg: DictConfig, composition: Composition) -> None:
    """Raises ConfigError for whatever a user can mend."""
    _checked.clear()
    _checked[OmegaConf.to_yaml(cfg)] = build_comparison(cfg, composition.source.dirs)


def build_comparison(cfg: DictConfig, dirs: Sequence[Path]) -> Comparable:
    """Compose and build every arm. Raises ConfigError."""
    settings = build_settings(cfg)
    return Comparable(settings, points(settings, ConfigSource(config_name="simulate", dirs=dirs)))


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="compare")
def main(cfg: DictConfig) -> None:
    """Run, evaluate, write, print."""
    key, folder, dirs = OmegaConf.to_yaml(cfg), _output_dir(), running_source().dirs
    state = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()  # the arms are composed from here on
    settings, arms = _checked.pop(key) if key in _checked else build_comparison(cfg, dirs)
    GlobalHydra.instance().hydra = state  # a multirun goes on with it
    console = terminal_console()
    experiment = settings.experiment
    with progress_of(console, enabled=settings.progress) as report:
        runs = run_all(arms, experiment.seeds, settings.num_processes, report)
    if runs.table.empty:
        raise KeyboardInterrupt  # before the first run was done
    found = evaluate(experiment, runs.table, interrupted=runs.interrupted)
    _write(folder, found, runs, arms, OmegaConf.to_container(cfg, resolve=True), report=settings.report)
    print_results(found, console)
    shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
    console.print(str(shown), style="dim", soft_wrap=True, highlight=False)
    if runs.interrupted:
        raise KeyboardInterrupt  # the partial result is written; what else was to run is not


def _write(
    folder: Path, found: Results, runs: Runs, arms: Sequence[Point], config: Any, *, report: bool
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
    write_table(runs.table, folder / "runs.parquet")
    record = {**found.to_json(verdicts(found)), "notes": runs.notes}
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (folder / "summary.json").write_text(f"{text}\n", encoding="utf-8")
    if report:
        write_comparison(folder / "compare.html", found, arms, config, runs.notes)


def _output_dir() -> Path:
    return Path(HydraConfig.get().runtime.output_dir)
