"""Fits a calibration to the measured tables of a device, and computes its errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from experiments.calibrate.operators import OPERATORS, Bools, Operator, Rows
from experiments.calibrate.tables import Measured
from experiments.study.errors import errors
from hwmodels.device import Device
from hwmodels.fitting.attention import capability_of, fit_attention
from hwmodels.fitting.collectives import fit_collectives
from hwmodels.fitting.gemm import capability_of as capability_of_gemm
from hwmodels.fitting.gemm import fit_gemm
from hwmodels.fitting.mla import fit_mla
from hwmodels.fitting.moe import fit_moe
from hwmodels.fitting.robust import Fitted, validation_rows
from hwmodels.operators import Calibration
from sim.settings.errors import ConfigError

CURVES = {
    "gemm": ("gemm",),
    "attention": ("attention_decode", "attention_prefill"),
    "mla": ("mla",),
    "moe": ("moe",),
    "collectives": ("collectives",),
}
"""Fields of `Calibration`, in the order of the fits -> the tables that each one needs."""


class FittedCalibration(NamedTuple):
    """A calibration, and the figures in it that the measurements do not determine."""

    calibration: Calibration
    undetermined: dict[str, tuple[float, float]]
    """curve.name -> the range of values that fit equally well."""


def fit_calibration(
    tables: Mapping[str, Measured], device: Device, *, compute_capability: str | None, source: str
) -> FittedCalibration:
    """Fits every curve whose tables exist; the other curves keep their defaults.

    Validation groups are held out. Raises ConfigError if rows cannot be fitted.
    """
    rows = {
        name: kept(table.rows, table.sound & ~validation(name, table.rows)) for name, table in tables.items()
    }
    for name in (name for curve in fitted_curves(tables) for name in CURVES[curve]):
        if not len(rows[name]["latency_us"]):
            raise ConfigError(
                f"ops: {name}: none of the {len(tables[name].sound)} rows is left to fit, as the others are "
                f"held out for validation or unsound; give rows of more "
                f"{', '.join(OPERATORS[name].group_by)}"
            )
    capability = compute_capability or capability_from(rows)
    fitted = Calibration(measured_on=device.name, source=source, sm_clock_hz=device.sm_clock_hz)

    def chip() -> str:
        if capability is None:
            raise ConfigError(
                "compute_capability: cannot be inferred from rows of mla and moe alone; "
                "give compute_capability=sm80, sm89, sm90, sm100 or sm120"
            )
        return capability

    fits: dict[str, Callable[[Calibration], Fitted[Any]]] = {
        "gemm": lambda c: fit_gemm(rows["gemm"], device, compute_capability=capability),
        "attention": lambda c: fit_attention(
            rows["attention_decode"], rows["attention_prefill"], device, compute_capability=capability
        ),
        "mla": lambda c: fit_mla(rows["mla"], device, c.gemm, c.stream, compute_capability=chip()),
        "moe": lambda c: fit_moe(rows["moe"], device, compute_capability=chip()),
        "collectives": lambda c: fit_collectives(rows["collectives"], device),
    }
    undetermined: dict[str, tuple[float, float]] = {}
    for curve in fitted_curves(tables):
        try:
            found = fits[curve](fitted)
        except ValueError as error:
            raise ConfigError(f"ops: {', '.join(CURVES[curve])}: {error}") from error
        fitted = replace(fitted, **{curve: found.curve})
        undetermined |= {f"{curve}.{name}": values for name, values in found.undetermined.items()}
    return FittedCalibration(fitted, undetermined)


def fitted_curves(tables: Mapping[str, Measured]) -> list[str]:
    """Returns the curves whose tables all exist."""
    return [curve for curve, needed in CURVES.items() if all(name in tables for name in needed)]


def validation(operator: str, rows: Rows) -> Bools:
    """Returns which rows are kept back from the fit of an operator, for validation."""
    return validation_rows(rows, OPERATORS[operator].group_by)


def capability_from(rows: Mapping[str, Rows]) -> str | None:
    """Infers the compute capability from the kernels that libraries chose; None if no row needs it.

    Raises ConfigError if the kernels are of different capabilities.
    """
    if "attention_decode" in rows:
        try:
            return capability_of(rows["attention_decode"]["kernel"])
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return capability_of_gemm(rows["gemm"]["kernel"]) if "gemm" in rows else None


def kept(rows: Rows, chosen: Bools) -> Rows:
    """Returns the chosen rows."""
    return {name: values[chosen] for name, values in rows.items()}


def residuals(operator: Operator, table: Measured, device: Device, calibration: Calibration) -> pd.DataFrame:
    """Returns data_type, size, measured_s, predicted_s and validation (held out) of every row.

    predicted_s is NaN for rows that the operator does not model.
    """
    rows = table.rows
    modelled = table.sound & operator.modelled(rows, device)
    predicted_s = np.full(len(modelled), np.nan)
    predicted_s[modelled] = operator.predict(kept(rows, modelled), device, calibration.on(device))
    return pd.DataFrame(
        {
            "data_type": operator.data_type(rows),
            "size": operator.size(rows),
            "measured_s": rows["latency_us"] * 1e-6,
            "predicted_s": predicted_s,
            "validation": validation(operator.name, rows),
        }
    )


def error_figures(lines: pd.DataFrame) -> dict[str, float]:
    """Computes rows, coverage (share of rows with a prediction), and median, p90 and bias in percent."""
    found = errors(lines["predicted_s"], lines["measured_s"])
    return {name: getattr(found, name) for name in ("rows", "coverage", "median", "p90", "bias")}


def error_table(lines: pd.DataFrame) -> pd.DataFrame:
    """Computes `error_figures` of fitted and of validation rows, for each data type and for all."""
    groups = [*lines.groupby("data_type")]
    if len(groups) > 1:
        groups.append(("all", lines))
    return pd.DataFrame(
        [
            {"data_type": name}
            | {f"fitted_{key}": value for key, value in error_figures(group[~group["validation"]]).items()}
            | error_figures(group[group["validation"]])
            for name, group in groups
        ]
    )


def fitted_figures(calibration: Calibration) -> list[str]:
    """Returns curve.name of every number that differs from its default, that is, was fitted."""
    default = Calibration()
    return [
        f"{curve}.{field.name}"
        for curve in CURVES
        for field in fields(getattr(calibration, curve))
        if isinstance(getattr(getattr(calibration, curve), field.name), float)
        and getattr(getattr(calibration, curve), field.name) != getattr(getattr(default, curve), field.name)
    ]
