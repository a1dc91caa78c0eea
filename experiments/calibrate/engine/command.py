"""`windtunnel calibrate device=...`: measures this machine for windtunnel's own engine.

This module does not import torch, so that settings are checked without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from experiments.app.job import CannotWriteError, UnsuccessfulError
from experiments.app.terminal import terminal_console
from experiments.calibrate.engine.pace import in_words, is_noisy
from experiments.calibrate.engine.settings import MeasureSettings
from sim.settings.build import build_as
from sim.settings.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureJob:
    """Settings of the measurement, and the config node of the model, which the engine reads itself."""

    settings: MeasureSettings
    node: Mapping[str, Any]

    def run(self, folder: Path) -> None:
        """Measures the machine, prints the errors of the table and writes the configs.

        Raises UnsuccessfulError if the machine was too noisy, and CannotWriteError if it cannot write.
        """
        console = terminal_console()
        with console.status("measuring") as status:
            try:
                found = _engine().measure(
                    self.settings, self.node, lambda text: status.update(f"measuring: {text}")
                )
            except (ValueError, RuntimeError, OSError) as error:
                raise ConfigError(_one_line(error)) from error
        console.print(operator_table(found.operators))
        console.print(error_table(found.errors, self.settings.device))
        for note in found.notes:
            console.print(note, highlight=False, soft_wrap=True)
        try:
            found.write()
        except OSError as error:
            raise CannotWriteError(
                f"{error.filename}: {error.strerror}; make room or choose another out="
            ) from error
        console.print(found.next_command, style="dim", highlight=False, soft_wrap=True)
        if found.pace is not None and is_noisy(found.pace):
            raise UnsuccessfulError(
                f"the machine was too noisy: {in_words(found.pace)}; the files are written; measure again "
                "while fewer other programs run"
            )


def prepare(cfg: dict[str, Any]) -> MeasureJob:
    """Builds the job. Raises ConfigError for wrong settings, and if this machine cannot run the model."""
    settings, node = _settings(cfg)
    try:
        _engine().check(settings, node)
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(_one_line(error)) from error
    return MeasureJob(settings=settings, node=node)


def operator_table(operators: pd.DataFrame) -> Table:
    """Returns a table of the measured operators, one row each."""
    table = _plain_table("Operators, microseconds per call")
    for heading in ("operator", "component", "calls", "points", "smallest", "largest"):
        table.add_column(heading, justify="left" if heading in ("operator", "component") else "right")
    for row in operators.to_dict("records"):
        figures = [f"{row[name]:,.0f}" for name in ("calls", "points")]
        figures += [f"{row[name]:,.1f}" for name in ("smallest_us", "largest_us")]
        table.add_row(str(row["operator"]), str(row["component"]), *figures)
    return table


def error_table(errors: pd.DataFrame, device: str) -> Table:
    """Returns a table of the errors of predicted iteration times, one row per kind of iteration."""
    clock = "thread time, one thread" if device == "cpu" else "wall time"
    table = _plain_table(f"Predicted against measured iteration times ({clock})")
    for heading in ("kind", "iterations", "median error", "p90 error", "bias", "error of total time"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for row in errors.to_dict("records"):
        figures = [f"{row[name]:.1%}" for name in ("median", "p90")]
        figures += [f"{row[name]:+.1%}" for name in ("bias", "total")]
        table.add_row(str(row["kind"]), str(row["iterations"]), *figures)
    return table


def _plain_table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))


def _settings(cfg: dict[str, Any]) -> tuple[MeasureSettings, Mapping[str, Any]]:
    """Returns the settings, and the config node of the model, which the engine reads itself.

    Raises ConfigError if no model is chosen or a setting is wrong.
    """
    if cfg.get("model") is None:
        raise ConfigError("model: must be chosen, such as model=random_8m, or model=hf model.path=FOLDER")
    given, chosen = dict(cfg["measure"]), dict(cfg["model"])
    if cfg["device"] == "cpu" and chosen.get("dtype") == "auto":
        chosen["dtype"] = "fp32"  # the engine's default on a CPU
    given |= {"device": cfg["device"], "model": chosen}
    if cfg["out"] != "???":
        given["out"] = cfg["out"]
    settings: MeasureSettings = build_as(MeasureSettings, given, "")
    return settings, chosen


def _engine() -> Any:
    """Imports the module that needs torch. Raises ConfigError if a package is missing."""
    try:
        return importlib.import_module("experiments.calibrate.engine.run")
    except ImportError as error:
        raise ConfigError(f"the engine needs {error.name}: pip install 'windtunnel[engine]'") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
