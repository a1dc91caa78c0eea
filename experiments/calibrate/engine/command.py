"""`windtunnel calibrate device=...`: measure this machine for our own engine, in minutes.

Nothing here imports torch: settings are checked, and refused, without it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from experiments.app.terminal import terminal_console
from experiments.calibrate.engine.settings import MeasureSettings
from sim.settings.build import build_as
from sim.settings.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureJob:
    """What is measured, and the model's node, which the engine reads in its own way."""

    settings: MeasureSettings
    node: Mapping[str, Any]

    def run(self, folder: Path) -> None:
        """Measure, write, print."""
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
        console.print(found.how_to, style="dim", highlight=False, soft_wrap=True)


def prepare(cfg: DictConfig) -> MeasureJob:
    """Raises ConfigError for what cannot be measured, here and so."""
    settings, node = _settings(cfg)
    try:
        _engine().check(settings, node)
    except (ValueError, RuntimeError, OSError) as error:
        raise ConfigError(_one_line(error)) from error
    return MeasureJob(settings=settings, node=node)


def operator_table(operators: pd.DataFrame) -> Table:
    """What was measured, one line an operator."""
    table = _plain_table("Operators, microseconds a call")
    for heading in ("operator", "component", "calls", "points", "smallest", "largest"):
        table.add_column(heading, justify="left" if heading in ("operator", "component") else "right")
    for row in operators.to_dict("records"):
        figures = [f"{row[name]:,.0f}" for name in ("calls", "points")]
        figures += [f"{row[name]:,.1f}" for name in ("smallest_us", "largest_us")]
        table.add_row(str(row["operator"]), str(row["component"]), *figures)
    return table


def error_table(errors: pd.DataFrame, device: str) -> Table:
    """Whole iterations at random, priced by the table."""
    clock = "thread time, one thread" if device == "cpu" else "wall clock"
    table = _plain_table(f"Whole iterations against the table's price ({clock})")
    for heading in ("kind", "iterations", "median error", "p90", "bias", "of the total time"):
        table.add_column(heading, justify="left" if heading == "kind" else "right")
    for row in errors.to_dict("records"):
        figures = [f"{row[name]:.1%}" for name in ("median", "p90")]
        figures += [f"{row[name]:+.1%}" for name in ("bias", "total")]
        table.add_row(str(row["kind"]), str(row["iterations"]), *figures)
    return table


def _plain_table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))


def _settings(cfg: DictConfig) -> tuple[MeasureSettings, Mapping[str, Any]]:
    """The settings, and the model's node, which the engine reads in its own way."""
    if "model" not in cfg or cfg.model is None:
        raise ConfigError("model: must be chosen, say model=random_8m, or model=hf model.path=FOLDER")
    given: dict[str, Any] = dict(OmegaConf.to_container(cfg.measure, resolve=True))  # type: ignore[arg-type]
    chosen: Any = OmegaConf.to_container(cfg.model, resolve=True)
    if cfg.device == "cpu" and chosen.get("dtype") == "auto":
        chosen["dtype"] = "fp32"  # as the engine does by default
    given |= {"device": cfg.device, "model": chosen}
    if not OmegaConf.is_missing(cfg, "out"):
        given["out"] = cfg.out
    settings: MeasureSettings = build_as(MeasureSettings, given, "")
    return settings, chosen


def _engine() -> Any:
    """The part that needs torch."""
    try:
        return importlib.import_module("experiments.calibrate.engine.run")
    except ImportError as error:
        raise ConfigError(f"the engine needs {error.name}: pip install 'windtunnel[engine]'") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
