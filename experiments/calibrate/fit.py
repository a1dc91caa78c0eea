"""From the measured tables of a device to its calibration, and how far that is from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pandas as pd

from experiments.calibrate.operators import OPERATORS, Bools, Operator, Rows
from experiments.calibrate.tables import Measured
from hwmodels.devices.device import Device
from hwmodels.fitting.attention import capability_of, fit_attention
from hwmodels.fitting.collectives import fit_collectives
from hwmodels.fitting.gemm import capability_of as capability_of_gemm
from hwmodels.fitting.gemm import fit_gemm
from hwmodels.fitting.mla import fit_mla
from hwmodels.fitting.moe import fit_moe
from hwmodels.fitting.robust import errors, validation_rows
from hwmodels.operators.calibration import Calibration
from sim.settings.errors import ConfigError

CURVES = {
    "gemm": ("gemm",),
    "attention": ("attention_decode", "attention_prefill"),
    "mla": ("mla",),
    "moe": ("moe",),
    "collectives": ("collectives",),
}
"""Fields of `Calibration`, in the order of the fits, and the tables that each one needs."""


def fit_calibration(
    tables: Mapping[str, Measured], device: Device, *, compute_capability: str | None, source: str
) -> Calibration:
    """Every curve whose tables are there; the others keep their defaults.

    Validation groups are kept back. Raises ConfigError where rows cannot be fitted.
    """
    rows = {
        name: kept(table.rows, table.sound & ~validation(name, table.rows)) for name, table in tables.items()
    }
    capability = compute_capability or capability_from(rows)
    fitted = Calibration(measured_on=device.name, source=source)

    def chip() -> str:
        if capability is None:
            raise ConfigError(
                "compute_capability: rows of mla and moe alone do not tell the chip; "
                "give compute_capability=sm80, sm90, sm100 or sm120"
            )
        return capability

    fits: dict[str, Callable[[Calibration], Any]] = {
        "gemm": lambda c: fit_gemm(rows["gemm"], device, compute_capability=capability),
        "attention": lambda c: fit_attention(
            rows["attention_decode"], rows["attention_prefill"], device, compute_capability=capability
        ),
        "mla": lambda c: fit_mla(rows["mla"], device, c.gemm, c.stream, compute_capability=chip()),
        "moe": lambda c: fit_moe(rows["moe"], device, compute_capability=chip()),
        "collectives": lambda c: fit_collectives(rows["collectives"], device),
    }
    for curve in fitted_curves(tables):
        try:
            found = fits[curve](fitted)
        except ValueError as error:
            raise ConfigError(f"ops: {', '.join(CURVES[curve])}: {error}") from error
        fitted = replace(fitted, **{curve: found})
    return fitted


def fitted_curves(tables: Mapping[str, Measured]) -> list[str]:
    """Those whose tables are all there."""
    return [curve for curve, needed in CURVES.items() if all(name in tables for name in needed)]


def validation(operator: str, rows: Rows) -> Bools:
    return validation_rows(rows, OPERATORS[operator].group_by)


def capability_from(rows: Mapping[str, Rows]) -> str | None:
    """The chip's compute capability, by the kernels that libraries chose on it; None: no row asks for it."""
    if "attention_decode" in rows:
        try:
            return capability_of(rows["attention_decode"]["kernel"])
        except ValueError as error:
            raise ConfigError(str(error)) from error
    return capability_of_gemm(rows["gemm"]["kernel"]) if "gemm" in rows else None


def kept(rows: Rows, chosen: Bools) -> Rows:
    return {name: values[chosen] for name, values in rows.items()}


def residuals(operator: Operator, table: Measured, device: Device, calibration: Calibration) -> pd.DataFrame:
    """A line a row: data_type, size, measured_s, predicted_s (NaN: no answer), validation (was kept back)."""
    rows = table.rows
    answered = table.sound & operator.answered(rows, device)
    predicted_s = np.full(len(answered), np.nan)
    predicted_s[answered] = operator.predict(kept(rows, answered), device, calibration)
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
    """rows, coverage (share of them with an answer), median, p90 and bias in percent."""
    answered = lines[lines["predicted_s"].notna()]
    figures = {"rows": len(lines), "coverage": len(answered) / len(lines) if len(lines) else np.nan}
    if answered.empty:
        return figures | {"median": np.nan, "p90": np.nan, "bias": np.nan}
    found = errors(answered["predicted_s"].to_numpy(), answered["measured_s"].to_numpy())
    return figures | {"median": found.median, "p90": found.p90, "bias": found.bias}


def error_table(lines: pd.DataFrame) -> pd.DataFrame:
    """`error_figures` of each data type, and of all, side by side: those of fitted and of validation rows."""
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
    """curve.name of every number that differs from its default: those that rows decided."""
    default = Calibration()
    return [
        f"{curve}.{field.name}"
        for curve in CURVES
        for field in fields(getattr(calibration, curve))
        if isinstance(getattr(getattr(calibration, curve), field.name), float)
        and getattr(getattr(calibration, curve), field.name) != getattr(getattr(default, curve), field.name)
    ]
