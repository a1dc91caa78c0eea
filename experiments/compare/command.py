"""`windtunnel compare`: compares arms on the same traffic, with intervals over seeds and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console

from experiments.app.application import Application, launch, parser_of
from experiments.app.list_choices import choices_table
from experiments.app.settings.compose import Composition, ConfigSource
from experiments.app.settings.config_groups import find_groups
from experiments.compare.arms import points
from experiments.compare.page import page_of
from experiments.compare.results import evaluate
from experiments.compare.sentences import caveats, verdicts
from experiments.compare.settings import CompareSettings, build_settings
from experiments.compare.tables import print_results
from experiments.study.runs import Point, run_all
from experiments.study.study import Findings, StudyJob
from experiments.study.workers import Report

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


def application_of(words: Sequence[str]) -> Application:
    """Returns the application that composes these words: of an experiment, or of arms of one's own."""
    return OWN_ARMS if any(word.startswith("compare.") for word in words) else APPLICATION


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
        launch(application_of(arguments), arguments)
        return
    console = Console(stderr=True, highlight=False)
    console.print(USAGE, soft_wrap=True, markup=False)
    choices = find_groups(APPLICATION.source(options.config_dir).dirs)["experiment"]
    console.print(choices_table(choices, width=min(console.width, 100)))
    raise SystemExit(2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparing:
    """Comparison whose arms have been composed and built."""

    cfg: dict[str, Any]
    settings: CompareSettings
    points: Sequence[Point]

    def find(self, report: Report) -> Findings | None:
        """Runs all arms and compares them; see `Study`."""
        experiment = self.settings.experiment
        runs = run_all(self.points, experiment.seeds, self.settings.runs_on, report)
        if runs.table.empty:
            return None
        found = evaluate(experiment, runs)
        sentences = verdicts(found)
        return Findings(
            name="compare",
            config=self.cfg,
            tables={"runs": runs.table},
            verdicts=sentences,
            caveats=caveats(found),
            record={**found.to_json(sentences), "notes": runs.notes},
            show=partial(print_results, found),
            draw=partial(page_of, found, self.points, self.cfg),
            is_whole=not runs.interrupted,
        )


def prepare(cfg: dict[str, Any], composition: Composition) -> StudyJob:
    """Composes and builds every arm. Raises ConfigError for a wrong setting."""
    settings = build_settings(cfg)
    simulate = ConfigSource(config_name="simulate", dirs=composition.source.dirs)
    return comparison(cfg, settings, points(settings, simulate))


def comparison(cfg: dict[str, Any], settings: CompareSettings, points: Sequence[Point]) -> StudyJob:
    """Returns the job of a comparison whose points have been composed and built."""
    return settings.job(Comparing(cfg=cfg, settings=settings, points=points))
