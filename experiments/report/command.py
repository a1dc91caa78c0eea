"""`windtunnel report run=DIR` and `sweep=DIR`: draws a report again without simulating."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.app.key_values import key_values
from experiments.app.run_folder import file_errors_reported
from experiments.app.terminal import terminal_console
from experiments.report.run import redraw
from experiments.sweep.folder import SweepFolder
from experiments.sweep.page import of_folder, print_found, write
from experiments.sweep.settings import FORMATS, LISTS, ReportSettings, build_report_settings
from sim.settings.errors import ConfigError

USAGE = f"""\
usage: windtunnel report run=DIR [report.format=html,png,svg]
       windtunnel report sweep=DIR [metric=KEY,...] [report.x=AXIS] [report.y=AXIS] [report.colour=AXIS] ...

Draws the report of a run or a sweep from the files in its folder, without simulating again.

  run=DIR            folder of a run of windtunnel simulate (output.tables=true) or sweep (sweep.tables=true)
  sweep=DIR          folder of windtunnel sweep, finished or not
  metric=KEY,...     metrics of summary.json to plot: ttft.p99_s, cost.usd, ...
  report.x=AXIS      axis along lines and heat maps; default: the numeric axis with the most values
  report.colour=AXIS axis with one line per value
  report.facet=A,B   axes with one panel per combination of values; default: all other axes
  report.y=AXIS      the other axis of heat maps
  report.format=F,.. some of {", ".join(FORMATS)}; images are written to DIR/figures
  --trust            allow the folder of a run to name classes of your own, which are then imported and run"""
TRUST = "--trust"
ELSEWHERE = "copy the folder to another place"
OF_A_SWEEP = ("report.metrics", "report.x", "report.y", "report.colour", "report.facet")
SETTINGS = ("run", "sweep", "metric", "report.format", *OF_A_SWEEP)


def main(arguments: Sequence[str]) -> None:
    """Draws the report and prints the written files. Raises ConfigError."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(USAGE)
        return
    trust = TRUST in arguments
    given = _parsed([argument for argument in arguments if argument != TRUST])
    settings = _settings(given)
    console = terminal_console()
    if trust:
        sys.path.append(os.getcwd())  # where the user's own classes are
    with file_errors_reported(Path(given.get("run") or given["sweep"]), ELSEWHERE):
        written = _drawn(given, settings, console, trust=trust)
    for file in written:
        console.print(Text(str(file), style="dim"), soft_wrap=True)


def _drawn(
    given: Mapping[str, str], settings: ReportSettings, console: Console, *, trust: bool
) -> list[Path]:
    """Draws the run or the sweep, and returns the files that were written."""
    if "run" in given:
        return redraw(Path(given["run"]), settings, trust=trust)
    folder = SweepFolder.open(Path(given["sweep"]), "sweep")
    if not any(row["status"] == "done" for row in folder.rows.values()):
        raise ConfigError(
            f"sweep={given['sweep']}: none of its runs has finished; finish the sweep with windtunnel "
            "sweep resume=..."
        )
    grid = of_folder(folder, settings)
    print_found(grid, console)
    return write(grid, folder, settings)


def _parsed(arguments: Sequence[str]) -> dict[str, str]:
    given = key_values(arguments, SETTINGS)
    for key, value in given.items():
        if not value:
            raise ConfigError(f"{key}=: must have a value")
    if "metric" in given:
        given["report.metrics"] = given.pop("metric")
    if ("run" in given) == ("sweep" in given):
        raise ConfigError("give either run=DIR or sweep=DIR")
    for key in given:
        if "run" in given and key in OF_A_SWEEP:
            name = "metric" if key == "report.metrics" else key
            raise ConfigError(f"{name}={given[key]}: applies to sweeps only")
    return given


def _settings(given: dict[str, str]) -> ReportSettings:
    node: dict[str, Any] = {}
    for key, value in given.items():
        name = key.removeprefix("report.")
        if key != name:
            node[name] = value.strip("[]").split(",") if name in LISTS else value
    return build_report_settings(node, "report")
