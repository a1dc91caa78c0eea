"""`windtunnel roofline`: places a model's prefill and decode under the roofline of a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.app.run_folder import check_output_file, file_errors_reported, print_path
from experiments.app.settings.compose import Composition
from experiments.app.terminal import terminal_console
from experiments.report.roofline.chart import write_chart
from experiments.report.roofline.survey import RooflineSettings, Survey, survey
from experiments.report.roofline.tables import print_survey
from sim.settings.build import build_as
from sim.settings.errors import ConfigError
from sim.settings.scenario import with_layout


def build_survey(cfg: dict[str, Any]) -> Survey:
    """Builds the survey. Raises ConfigError for every mistake of the user."""
    own = {**cfg, "speculation": cfg["speculation"] or None}  # the choice `none` is an empty node
    settings: RooflineSettings = build_as(RooflineSettings, with_layout(own), "")
    try:
        if settings.out is not None:
            check_output_file("out", settings.out)
        return survey(settings)
    except ValueError as error:
        raise ConfigError(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class RooflineJob:
    """A computed survey, to be printed and drawn."""

    found: Survey

    def run(self, folder: Path) -> None:
        """Prints the survey and draws the chart."""
        console, out = terminal_console(), self.found.settings.out
        print_survey(self.found, console)
        if out is not None:
            with file_errors_reported(Path(out), "choose another file with out="):
                write_chart(Path(out), self.found)
            print_path(out, console)


def prepare(cfg: dict[str, Any], composition: Composition) -> RooflineJob:
    """Builds the job. Raises ConfigError for every mistake of the user."""
    return RooflineJob(found=build_survey(cfg))
