"""`windtunnel compare`: compares arms on the same traffic, with intervals over seeds and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.app.application import Application, launch, parser_of
from experiments.app.list_choices import choices_table
from experiments.app.run_folder import print_folder, write_study
from experiments.app.settings.compose import Composition, ConfigSource
from experiments.app.settings.config_groups import find_groups
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

APPLICATION = Application(
    name="compare",
    summary="Compare policies on the same traffic, with confidence intervals over seeds and a verdict.",
    module="experiments.compare.command",
    config_name="compare",
)

OWN_ARMS = Application(
    name="compare",
    summary=APPLICATION.summary,
    module="experiments.compare.own",
    config_name="compare_own",
)

USAGE = """\
usage: windtunnel compare experiment=NAME [key=value ...]
       windtunnel compare "compare.arms=['NAME: key=value ...','NAME: key=value ...']" [key=value ...]

Runs the arms of an experiment, or your own, on the same traffic. All settings: windtunnel compare
experiment=NAME --help, or windtunnel compare compare.arms=[] --help

experiments"""


def main(arguments: Sequence[str]) -> None:
    """Runs a comparison; without a setting, prints the experiments. Raises what `launch` raises."""
    options = parser_of(APPLICATION).parse_intermixed_args(arguments)
    if any(value for name, value in vars(options).items() if name != "config_dir"):
        own = any(word.startswith("compare.") for word in arguments)
        launch(OWN_ARMS if own else APPLICATION, arguments)
        return
    console = Console(stderr=True, highlight=False)
    console.print(USAGE, soft_wrap=True, markup=False)
    choices = find_groups(APPLICATION.source(options.config_dir).dirs)["experiment"]
    console.print(choices_table(choices, width=min(console.width, 100)))
    raise SystemExit(2)


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareJob:
    """Comparison whose arms have been composed and built."""

    cfg: dict[str, Any]
    settings: CompareSettings
    points: Sequence[Point]

    def run(self, folder: Path) -> None:
        """Runs all arms, compares them, writes the results and prints them.

        Raises KeyboardInterrupt after Ctrl-C, once the results so far are written.
        """
        console, experiment = terminal_console(), self.settings.experiment
        with progress_of(console, enabled=self.settings.progress) as report:
            runs = run_all(self.points, experiment.seeds, self.settings.num_processes, report)
        if runs.table.empty:
            raise KeyboardInterrupt  # no run has ended yet
        found = evaluate(experiment, runs.table, interrupted=runs.interrupted, traced=runs.traced)
        print_results(found, console)
        self._write(folder, found, runs)
        print_folder(folder, console)
        if runs.interrupted:
            raise KeyboardInterrupt  # the partial results are written

    def _write(self, folder: Path, found: Results, runs: Runs) -> None:
        config = self.cfg
        write_table(runs.table, folder / "runs.parquet")
        write_study(folder, config, {**found.to_json(verdicts(found)), "notes": runs.notes})
        if self.settings.report:
            write_comparison(folder / "compare.html", found, self.points, config, runs.notes)


def prepare(cfg: dict[str, Any], composition: Composition) -> CompareJob:
    """Composes and builds every arm. Raises ConfigError for a wrong setting."""
    settings = build_settings(cfg)
    simulate = ConfigSource(config_name="simulate", dirs=composition.source.dirs)
    return CompareJob(cfg=cfg, settings=settings, points=points(settings, simulate))
