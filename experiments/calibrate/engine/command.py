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
from hwmodels.checks import check_finite, check_whole
from hwmodels.model.model_spec import ModelSpec
from sim.settings.build import build_as
from sim.settings.errors import ConfigError

DEVICES = ("cpu", "cuda")
DEFAULT_OUT = "mine"
LIMITS = {
    "cpu": {"max_num_seqs": 32, "max_model_len": 1024, "max_num_batched_tokens": 1024, "budget_s": 45.0},
    "cuda": {"max_num_seqs": 256, "max_model_len": 8192, "max_num_batched_tokens": 8192, "budget_s": 300.0},
}
"""What is measured by default; tables go on in proportion beyond."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSettings:
    """Settings of `windtunnel calibrate device=...`."""

    device: str
    """cpu or cuda."""
    model: ModelSpec
    out: str = DEFAULT_OUT
    """A folder of the user's own configs."""
    name: str | None = None
    """Of the machine, in hardware=; None: cpu, or that of the GPU."""
    max_num_seqs: int | None = None
    max_model_len: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int = 16
    budget_s: float | None = None
    """Of measuring, whole rounds though: one to warm up and three at least."""
    iterations: int = 60
    """At random, to compare the table with."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise ValueError(f"device={self.device}: must be one of {', '.join(DEVICES)}")
        for name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "iterations"):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value)
        if self.max_model_len is not None and self.max_model_len < 64:
            raise ValueError(f"max_model_len={self.max_model_len}: must be a whole number >= 64")
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < 8:
            raise ValueError(f"max_num_batched_tokens={self.max_num_batched_tokens}: must be >= 8")
        if self.budget_s is not None:
            check_finite("budget_s", self.budget_s, unit="s")
        if self.name is not None and not self.name.isidentifier():
            raise ValueError(f"name={self.name}: must be letters, digits and _: it is a file's name")

    def limit(self, name: str) -> int:
        """max_num_seqs, max_model_len or max_num_batched_tokens; never more than the model's context."""
        given: int | None = getattr(self, name)
        value = int(LIMITS[self.device][name]) if given is None else given
        return min(value, self.model.max_position_embeddings) if name == "max_model_len" else value

    @property
    def seconds(self) -> float:
        """The budget."""
        return LIMITS[self.device]["budget_s"] if self.budget_s is None else self.budget_s


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
