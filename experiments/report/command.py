"""`windtunnel report run=DIR` and `sweep=DIR`: draw again without simulating."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from experiments.app.key_values import key_values
from experiments.app.terminal import terminal_console
from experiments.report.run import redraw
from experiments.sweep.folder import SweepFolder
from experiments.sweep.page import of_folder, print_found, write
from experiments.sweep.settings import FORMATS, LISTS, ReportSettings, build_report_settings
from sim.settings.errors import ConfigError

USAGE = f"""\
usage: windtunnel report run=DIR [report.format=html,png,svg]
       windtunnel report sweep=DIR [metric=KEY,...] [report.x=AXIS] [report.y=AXIS] [report.colour=AXIS] ...

Draw a run, or a sweep, from what it has left in its folder. Nothing is simulated.

  run=DIR            of windtunnel simulate (with output.tables=true) or a run of a sweep (sweep.tables=true)
  sweep=DIR          of windtunnel sweep, finished or not
  metric=KEY,...     figures of summary.json, a drawing each: ttft.p99_s, cost.usd, ...
  report.x=AXIS      along lines and maps; without it the numeric axis with the most values
  report.colour=AXIS a line for each of its values
  report.facet=A,B   a panel for each combination of their values; without it all other axes
  report.y=AXIS      the other axis of maps
  report.format=F,.. of {", ".join(FORMATS)}; pictures go to DIR/figures"""
OF_A_SWEEP = ("report.metrics", "report.x", "report.y", "report.colour", "report.facet")
SETTINGS = ("run", "sweep", "metric", "report.format", *OF_A_SWEEP)


def main(arguments: Sequence[str]) -> None:
    """Draw, and say what was written. Raises ConfigError."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return
    given = _parsed(arguments)
    settings = _settings(given)
    console = terminal_console()
    sys.path.append(os.getcwd())  # a user's own classes
    if "run" in given:
        written = redraw(Path(given["run"]), settings)
    else:
        folder = SweepFolder.open(Path(given["sweep"]), "sweep")
        if not any(row["status"] == "done" for row in folder.rows.values()):
            raise ConfigError(f"sweep={given['sweep']}: no run of it is done; windtunnel sweep resume=...")
        grid = of_folder(folder, settings)
        print_found(grid, console)
        written = write(grid, folder, settings)
    for file in written:
        console.print(Text(str(file), style="dim"), soft_wrap=True)


def _parsed(arguments: Sequence[str]) -> dict[str, str]:
    given = key_values(arguments, SETTINGS)
    for key, value in given.items():
        if not value:
            raise ConfigError(f"{key}=: must have a value")
    if "metric" in given:
        given["report.metrics"] = given.pop("metric")
    if ("run" in given) == ("sweep" in given):
        raise ConfigError("one of run=DIR and sweep=DIR must be given")
    for key in given:
        if "run" in given and key in OF_A_SWEEP:
            name = "metric" if key == "report.metrics" else key
            raise ConfigError(f"{name}={given[key]}: is for a sweep; a run has its own figures")
    return given


def _settings(given: dict[str, str]) -> ReportSettings:
    node: dict[str, Any] = {}
    for key, value in given.items():
        name = key.removeprefix("report.")
        if key != name:
            node[name] = value.strip("[]").split(",") if name in LISTS else value
    return build_report_settings(node, "report")
