"""`windtunnel compare`: arms on the same traffic, intervals over seeds, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from experiments.app.run_folder import print_folder, resolved_config, write_study
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
from sim.settings.compose import Composition, ConfigSource


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareJob:
    """What a comparison needs: its arms have been composed and built."""

    cfg: DictConfig
    settings: CompareSettings
    points: Sequence[Point]

    def run(self, folder: Path) -> None:
        """Run, evaluate, write, print."""
        console, experiment = terminal_console(), self.settings.experiment
        with progress_of(console, enabled=self.settings.progress) as report:
            runs = run_all(self.points, experiment.seeds, self.settings.num_processes, report)
        if runs.table.empty:
            raise KeyboardInterrupt  # before the first run was done
        found = evaluate(experiment, runs.table, interrupted=runs.interrupted)
        self._write(folder, found, runs)
        print_results(found, console)
        print_folder(folder, console)
        if runs.interrupted:
            raise KeyboardInterrupt  # the partial result is written; what else was to run is not

    def _write(self, folder: Path, found: Results, runs: Runs) -> None:
        config = resolved_config(self.cfg)
        write_table(runs.table, folder / "runs.parquet")
        write_study(folder, config, {**found.to_json(verdicts(found)), "notes": runs.notes})
        if self.settings.report:
            write_comparison(folder / "compare.html", found, self.points, config, runs.notes)


def prepare(cfg: DictConfig, composition: Composition) -> CompareJob:
    """Compose and build every arm. Raises ConfigError."""
    settings = build_settings(cfg)
    simulate = ConfigSource(config_name="simulate", dirs=composition.source.dirs)
    return CompareJob(cfg=cfg, settings=settings, points=points(settings, simulate))
