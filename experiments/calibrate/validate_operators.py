"""Errors of predicted operator times on held-out measurements.

    python -m experiments.calibrate.validate_operators ops=DIR [report=FILE.html] [refit=true]

Prints Markdown tables: median / p90 absolute percentage error and coverage on the validation groups, by
operator and data type, beside the targets, for every GPU of the tables that has a hardware preset. The
first table uses each device's own calibration, if it has one; the others use the calibration of a related
device, as if the device had never been measured. ops: a folder of tables as for `windtunnel calibrate`.
report: a page with residual plots. refit: fit again instead of reading configs/calibration.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from omegaconf import OmegaConf

from experiments.app.run_folder import check_output_file
from experiments.app.settings.compose import resolved
from experiments.calibrate.fit import error_figures, fit_calibration, kept, residuals, validation
from experiments.calibrate.operators import OPERATORS
from experiments.calibrate.relatives import composed, known_calibrations, measured_gpus, relative_of
from experiments.calibrate.residual_plots import residual_figure
from experiments.calibrate.tables import Measured, read_tables
from hwmodels.device import Device
from hwmodels.operators import Calibration
from sim.report.plain_page import drawn, write_page
from sim.settings.build import build_as
from sim.settings.errors import ConfigError

TARGETS = {
    ("gemm", "bfloat16"): "6 / 20",
    ("gemm", "fp8"): "12 / 35",
    ("gemm", "fp8_block"): "12 / 35",
    ("gemm", "int4_wo"): "15 / 40",
    ("gemm", "nvfp4"): "15 / 40",
    ("attention_decode", "all"): "8 / 25",
    ("attention_prefill", "all"): "8 / 25",
    ("mla", "all"): "12 / 35",
    ("moe", "all"): "15 / 40",
    ("collectives", "all"): "12 / 35",
}
NO_LINES = pd.DataFrame({"data_type": [], "measured_s": [], "predicted_s": []})
LEFT_OUT_TARGETS = {(name, "all"): "15 / 40" for name in ("gemm", "attention_decode", "attention_prefill")}


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidateSettings:
    """Settings of this script."""

    ops: str
    report: str | None = None
    refit: bool = False

    def __post_init__(self) -> None:
        if self.report is not None:
            check_output_file("report", self.report)


class Gpu(NamedTuple):
    """One measured device, and its validation rows."""

    device: Device
    calibration: Calibration
    tables: dict[str, Measured]

    @property
    def is_calibrated(self) -> bool:
        """True if the calibration was measured on this device, not on a relative."""
        return self.calibration.measured_on == self.device.name


def main(arguments: Sequence[str]) -> None:
    """Prints the errors of every calibration on its own GPU, and of those borrowed from a relative."""
    settings: ValidateSettings = build_as(ValidateSettings, resolved(OmegaConf.from_cli(list(arguments))), "")
    found = measured_gpus(Path(settings.ops))
    gpus = {name: read_gpu(name, settings) for name in found.presets}
    own = {name: lines_of(gpu, gpu.calibration) for name, gpu in gpus.items()}
    calibrations = known_calibrations() | {name: gpu.calibration for name, gpu in gpus.items()}
    relatives = {name: calibrations[relative_of(name, calibrations)] for name in gpus}
    print(f"Median / p90 absolute percentage error on validation groups, {date.today().isoformat()}.\n")
    if found.unknown:
        print(f"Left out, as there is no hardware preset of this name: {', '.join(found.unknown)}.\n")
    borrowed = pairs((gpu.device.name, gpu.calibration) for gpu in gpus.values() if not gpu.is_calibrated)
    if borrowed:
        print(f"Never measured, so with the calibration of another device: {borrowed}.\n")
    print(markdown(own, gpus, TARGETS, by_type=True))
    by = pairs((gpu.device.name, relatives[name]) for name, gpu in gpus.items())
    print(f"\nWith the calibration of another device and the device's own data sheet ({by}):\n")
    left_out = {name: lines_of(gpu, relatives[name]) for name, gpu in gpus.items()}
    print(markdown(left_out, gpus, LEFT_OUT_TARGETS, by_type=False))
    print("\nWith the calibration of another device and the kernels of the device's own compute capability;")
    print(
        "the differences between these kernels were fitted to rows of several devices, this one included.\n"
    )
    left_out = {
        name: lines_of(gpu, with_capability(relatives[name], gpu.calibration)) for name, gpu in gpus.items()
    }
    print(markdown(left_out, gpus, LEFT_OUT_TARGETS, by_type=False))
    if settings.report is not None:
        _write_report(Path(settings.report), own)


def pairs(calibrations: Iterable[tuple[str, Calibration]]) -> str:
    """Formats devices with the device whose calibration each gets: "A by B, C by D"."""
    return ", ".join(
        f"{device} by {found.measured_on or 'typical figures'}" for device, found in calibrations
    )


def read_gpu(name: str, settings: ValidateSettings) -> Gpu:
    """Reads the validation rows of a GPU, and its calibration; fits that anew if settings.refit is set."""
    device, calibration = composed(name)
    tables = read_tables(Path(settings.ops), device)
    if settings.refit:
        calibration = fit_calibration(tables, device, compute_capability=None, source="").calibration
    return Gpu(device, calibration, {key: kept_back(key, table) for key, table in tables.items()})


def kept_back(operator: str, table: Measured) -> Measured:
    """Returns the validation rows of a table."""
    chosen = validation(operator, table.rows)
    return Measured(kept(table.rows, chosen), table.sound[chosen], table.caveat)


def lines_of(gpu: Gpu, calibration: Calibration) -> dict[str, pd.DataFrame]:
    """Computes the residuals of a GPU by operator."""
    return {
        name: residuals(OPERATORS[name], table, gpu.device, calibration) for name, table in gpu.tables.items()
    }


def with_capability(calibration: Calibration, own: Calibration) -> Calibration:
    """Returns a calibration whose kernels are those of the compute capability of another one."""
    return replace(
        calibration,
        gemm=replace(calibration.gemm, compute_capability=own.gemm.compute_capability),
        attention=replace(calibration.attention, compute_capability=own.attention.compute_capability),
        mla=replace(calibration.mla, compute_capability=own.mla.compute_capability),
        moe=replace(calibration.moe, compute_capability=own.moe.compute_capability),
    )


def markdown(
    lines: Mapping[str, Mapping[str, pd.DataFrame]],
    gpus: Mapping[str, Gpu],
    targets: Mapping[tuple[str, str], str],
    *,
    by_type: bool,
) -> str:
    """Returns a Markdown table with one column per GPU and one row per operator that any GPU has.

    by_type: also one row per data type. lines: residuals by GPU and operator.
    """
    names = [gpus[name].device.name.split(" Blackwell")[0] for name in lines]
    heading = ["operator", "data type", "target", "all GPUs", "rows", "predicted", *names]
    table = [heading, ["---"] * len(heading)]
    for operator in OPERATORS.values():
        if not any(operator.name in found for found in lines.values()):
            continue
        of_operator = [found.get(operator.name, NO_LINES) for found in lines.values()]
        together = pd.concat([found for found in of_operator if len(found)] or [NO_LINES])
        for data_type in ["all", *(sorted(together["data_type"].unique()) if by_type else [])]:
            figures = error_figures(of_type(together, data_type))
            target = targets.get((operator.name, data_type), "")
            cells = [operator.title, data_type, target, median_and_p90(figures), f"{figures['rows']:,}"]
            cells += ["" if pd.isna(figures["coverage"]) else f"{figures['coverage']:.0%}"]
            cells += [median_and_p90(error_figures(of_type(found, data_type))) for found in of_operator]
            table.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)


def of_type(lines: pd.DataFrame, data_type: str) -> pd.DataFrame:
    """Returns the lines of a data type; all lines for "all"."""
    return lines if data_type == "all" else lines[lines["data_type"] == data_type]


def median_and_p90(figures: Mapping[str, float]) -> str:
    """Formats "median / p90" of percentage errors; "" without figures."""
    return "" if pd.isna(figures["median"]) else f"{figures['median']:.1f} / {figures['p90']:.0f}"


def _write_report(path: Path, lines: Mapping[str, Mapping[str, pd.DataFrame]]) -> None:
    sections = {}
    for name, operator in OPERATORS.items():
        parts = [found[name] for found in lines.values() if name in found and len(found[name])]
        together = pd.concat(parts or [NO_LINES], ignore_index=True)
        if together["predicted_s"].isna().all():
            continue
        sections[operator.title] = drawn(residual_figure(together, operator.size_label))
    write_page(path, "Errors of operators on validation groups", f"All GPUs: {', '.join(lines)}.", sections)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        print(f"validate_operators: {error}", file=sys.stderr)
        sys.exit(2)
