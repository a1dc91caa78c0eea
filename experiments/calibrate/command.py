"""`windtunnel calibrate`: fits the parameters of a device's hardware model to measured operators.

With device=, the command measures this machine for windtunnel's own engine: `experiments.calibrate.engine`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import pandas as pd
from rich.table import Table

from experiments.app.job import Job
from experiments.app.run_folder import check_output_file, print_path
from experiments.app.settings.compose import Composition
from experiments.app.terminal import terminal_console
from experiments.calibrate.engine import command as engine_command
from experiments.calibrate.fit import (
    FittedCalibration,
    error_table,
    fit_calibration,
    fitted_curves,
    fitted_figures,
    residuals,
)
from experiments.calibrate.operators import OPERATORS
from experiments.calibrate.residual_plots import residual_figure
from experiments.calibrate.tables import Measured, read_tables
from experiments.calibrate.yaml_file import calibration_yaml, is_calibration
from experiments.study.yaml_text import figure
from hwmodels.device import Device
from hwmodels.operators import Calibration
from hwmodels.operators.gemm import GemmCurve
from sim.report.files import write_whole
from sim.report.plain_page import drawn, write_page
from sim.settings.build import build_as

COLUMNS = {
    "rows fitted": "fitted_rows",
    "median": "fitted_median",
    "p90": "fitted_p90",
    "bias": "fitted_bias",
    "validation rows": "rows",
    "predicted": "coverage",
    "median ": "median",
    "p90 ": "p90",
    "bias ": "bias",
}
"""Columns of the printed table -> the keys of `error_table` that they show."""


ENGINE_SETTINGS = ("device", "model", "measure")
"""Settings that only the measurement of this machine uses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateSettings:
    """Settings of `windtunnel calibrate` without a device."""

    hardware: Device
    ops: str
    out: str
    report: str | None = None
    gpu: str | None = None
    """Name of the device in the column gpu of the tables; None: the names of the hardware presets."""
    compute_capability: str | None = None
    """sm80, sm90, ...; None: inferred from the kernels that the rows name."""
    source: str | None = None
    """Name of the source of the measurements; None: the name of the folder."""
    sustained_clock_share: float = 0.9
    """Copied to the calibration: it cannot be fitted to operators that were measured alone."""
    start_share: float = 0.8
    """Copied to the calibration, for the same reason."""
    peer_wait_s: float = 0.0
    """Copied to the calibration, for the same reason."""

    def __post_init__(self) -> None:
        self.copied_to(Calibration())  # raises ValueError if a value is impossible
        for name in ("out", "report"):
            if (value := getattr(self, name)) is not None:
                check_output_file(name, value)
        if Path(self.out).exists() and not is_calibration(Path(self.out)):
            raise ValueError(
                f"out={self.out}: exists and is not a calibration file; "
                "name another file, such as configs/calibration/my_gpu.yaml"
            )
        if self.compute_capability is not None:
            GemmCurve(compute_capability=self.compute_capability)  # raises ValueError if it is unknown

    def copied_to(self, calibration: Calibration) -> Calibration:
        """Returns the calibration with the figures that only whole engines show."""
        return replace(
            calibration,
            sustained_clock_share=self.sustained_clock_share,
            start_share=self.start_share,
            peer_wait_s=self.peer_wait_s,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CalibrateJob:
    """Fit of a calibration to measured operators, which have been read and checked."""

    settings: CalibrateSettings
    tables: dict[str, Measured]

    def run(self, folder: Path) -> None:
        """Fits the calibration, writes its file and the report, and prints the errors."""
        settings, tables, device = self.settings, self.tables, self.settings.hardware
        console = terminal_console()
        num_rows = sum(len(table.sound) for table in tables.values())
        fitted = fit_calibration(
            tables,
            device,
            compute_capability=settings.compute_capability,
            source=source_of(num_rows, settings.source or Path(settings.ops).resolve().name),
        )
        calibration = settings.copied_to(fitted.calibration)
        lines = {
            name: residuals(OPERATORS[name], table, device, calibration) for name, table in tables.items()
        }
        figures = {name: error_table(found) for name, found in lines.items()}
        for name, found in figures.items():
            console.print(printed(OPERATORS[name].title, found))
        notes = remarks(tables, fitted)
        for note in notes:
            console.print(note, highlight=False, soft_wrap=True)
        count = len(fitted_figures(calibration))
        description = f"{device.name}: {count} figures, fitted to {num_rows:,} measured operator calls"
        text = calibration_yaml(calibration, fitted_curves(tables), description, fitted.undetermined)
        write_whole(Path(settings.out), text)
        print_path(settings.out, console)
        if settings.report is not None:
            _write_report(Path(settings.report), device, lines, figures, notes)
            print_path(settings.report, console)


def prepare(cfg: dict[str, Any], composition: Composition) -> Job:
    """Builds the job. Raises ConfigError for wrong settings and for implausible tables."""
    if cfg["device"] is not None:
        return engine_command.prepare(cfg)
    settings = _settings(cfg)
    tables = read_tables(Path(settings.ops), settings.hardware, settings.gpu)
    return CalibrateJob(settings=settings, tables=tables)


def _settings(cfg: dict[str, Any]) -> CalibrateSettings:
    # Every hardware preset selects its present calibration, which the fit does not use.
    others = ("calibration", *ENGINE_SETTINGS)
    given = {key: value for key, value in cfg.items() if key not in others}
    settings: CalibrateSettings = build_as(CalibrateSettings, given, "")
    return settings


def source_of(num_rows: int, source: str) -> str:
    """Returns the calibration's text about its measurements."""
    held_out = "one group of shapes in four held out for validation"
    return f"{source}; {num_rows:,} rows, {held_out}; fitted {date.today().isoformat()}"


def remarks(tables: Mapping[str, Measured], fitted: FittedCalibration) -> list[str]:
    """Returns notes on the fit: its figures, those not determined, missing tables, and rows left out."""
    count = len(fitted_figures(fitted.calibration))
    figures = "1 figure was" if count == 1 else f"{count} figures were"
    notes = [
        f"{figures} fitted to measurements of {fitted.calibration.measured_on}; errors are in percent of the "
        "measured time."
    ]
    notes += [
        f"{name} is not determined by the rows: {figure(low)} to {figure(high)} fit equally well."
        for name, (low, high) in fitted.undetermined.items()
    ]
    missing = [OPERATORS[name].title for name in OPERATORS if name not in tables]
    if missing:
        notes.append(f"Defaults are kept for operators without rows of this device: {', '.join(missing)}.")
    return notes + [
        f"{OPERATORS[name].title}: left out {t.caveat}." for name, t in tables.items() if t.caveat
    ]


def printed(title: str, figures: pd.DataFrame) -> Table:
    """Returns the table of prediction errors by data type as it is printed."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    table.add_column("data type", no_wrap=True)
    for heading in COLUMNS:
        table.add_column(heading, justify="right")
    for line in figures.to_dict("records"):
        table.add_row(line["data_type"], *(shown(key, line[key]) for key in COLUMNS.values()))
    return table


def shown(key: str, value: float) -> str:
    """Formats a figure by its column: row counts, a share as a percentage, or a percentage error."""
    if pd.isna(value):
        return ""
    return (
        f"{value:,.0f}" if key.endswith("rows") else f"{value:.0%}" if key == "coverage" else f"{value:.1f}"
    )


def _write_report(
    path: Path,
    device: Device,
    lines: Mapping[str, pd.DataFrame],
    figures: Mapping[str, pd.DataFrame],
    notes: list[str],
) -> None:
    sections = {}
    for name, found in lines.items():
        table = figures[name].round(2).to_html(index=False, border=0)
        sections[OPERATORS[name].title] = table + drawn(residual_figure(found, OPERATORS[name].size_label))
    write_page(path, f"Calibration of {device.name}", " ".join(notes), sections)
