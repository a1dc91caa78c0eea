"""`windtunnel roofline`: where a model's prefill and decode lie under the roofline of a GPU."""

from __future__ import annotations

from pathlib import Path

import hydra
from omegaconf import DictConfig, ListConfig

from experiments.app.output_file import check_output_file
from experiments.app.terminal import terminal_console
from experiments.report.roofline.chart import write_chart
from experiments.report.roofline.survey import RooflineSettings, Survey, survey
from experiments.report.roofline.tables import print_survey
from sim.settings.build import build_as
from sim.settings.compose import Composition
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.layout import with_layout


def build_survey(cfg: DictConfig) -> Survey:
    """Raises ConfigError for whatever a user can mend."""
    own = {str(key): cfg[key] for key in cfg if key != "hydra"}
    if isinstance(own["batch_sizes"], ListConfig):
        own["batch_sizes"] = list(own["batch_sizes"])
    settings: RooflineSettings = build_as(RooflineSettings, with_layout(own), "")
    try:
        if settings.out is not None:
            check_output_file("out", settings.out)
        return survey(settings)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def check(cfg: DictConfig, composition: Composition) -> None:
    """Raises ConfigError for whatever a user can mend."""
    build_survey(cfg)


@hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name="roofline")
def main(cfg: DictConfig) -> None:
    """Compute, print, draw."""
    found = build_survey(cfg)
    console = terminal_console()
    print_survey(found, console)
    if found.settings.out is not None:
        write_chart(Path(found.settings.out), found)
        console.print(found.settings.out, style="dim", soft_wrap=True, highlight=False)
