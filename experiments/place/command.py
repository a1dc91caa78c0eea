"""`windtunnel place`: decides which models go on which GPUs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.app.run_folder import file_errors_reported, print_path
from experiments.app.settings.compose import Composition
from experiments.app.terminal import terminal_console
from experiments.place.problem import Placed, place
from experiments.place.settings import read_settings
from experiments.place.tables import as_json, print_plan
from sim.report.files import write_whole


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceJob:
    """A placement, computed while the settings are checked, since unmeetable demand is a user's error."""

    placed: Placed

    def run(self, folder: Path) -> None:
        """Prints the placement and writes it to a file."""
        console, out = terminal_console(), self.placed.settings.out
        print_plan(self.placed, console)
        if out is not None:
            with file_errors_reported(Path(out), "choose another file with out="):
                write_whole(Path(out), json.dumps(as_json(self.placed), indent=2) + "\n")
            print_path(out, console)


def prepare(cfg: dict[str, Any], composition: Composition) -> PlaceJob:
    """Computes the placement. Raises ConfigError for every mistake of the user."""
    composed = composition.source.compose_plain(composition.overrides)  # limits depend on each GPU
    return PlaceJob(placed=place(read_settings(composed), composition.source.dirs))
