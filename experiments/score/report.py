"""Computes the errors of predictions: absolute percentage errors, by groups of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

BANDS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
"""Limits of the concurrency bands."""


def errors_by_group(
    scored: pd.DataFrame, metrics: Sequence[str], groups: Sequence[str]
) -> dict[str, pd.DataFrame]:
    """Computes a table of errors per metric that has a measured column NAME and a predicted NAME_predicted.

    One row per group. Columns: rows (with a measurement), coverage (share of them with a prediction), mean,
    median and p90 of the absolute percentage error, and bias, the median of predicted / measured - 1 in
    percent.
    """
    tables = {}
    for metric in metrics:
        if metric not in scored:
            continue
        known = scored[scored[metric].notna()]
        lines = [_line("all", "", known, metric)]
        for group in groups:
            if group in known:
                lines += [_line(group, str(value), part, metric) for value, part in known.groupby(group)]
        tables[metric] = pd.DataFrame([line for line in lines if line["rows"]])
    return tables


def _line(group: str, value: str, rows: pd.DataFrame, metric: str) -> dict[str, object]:
    predicted = rows[rows[f"{metric}_predicted"].notna()]
    error = 100 * (predicted[f"{metric}_predicted"] / predicted[metric] - 1).to_numpy(dtype=np.float64)
    figures = {"mean": np.nan, "median": np.nan, "p90": np.nan, "bias": np.nan}
    if len(error):
        absolute = np.abs(error)
        median, p90 = np.percentile(absolute, [50, 90])
        figures = {"mean": absolute.mean(), "median": median, "p90": p90, "bias": np.median(error)}
    coverage = len(predicted) / len(rows) if len(rows) else 0.0
    return {"by": group, "value": value, "rows": len(rows), "coverage": coverage, **figures}


def concurrency_band(concurrency: float) -> str:
    """Returns the band of a concurrency: 1-3, 4-15, 16-63, ...; "not given" for NaN."""
    if np.isnan(concurrency):
        return "not given"
    for low, high in pairwise(BANDS):
        if low <= concurrency < high:
            return f"{low:>5}-{high - 1}"
    return f"{BANDS[-1]:>5}-"


def print_errors(tables: dict[str, pd.DataFrame], console: Console) -> None:
    """Prints a table of absolute percentage errors for each metric."""
    for metric, errors in tables.items():
        title = f"{metric}: absolute percentage error, in %; bias: median error with its sign"
        table = Table(title=title, title_justify="left")
        for column in errors.columns:
            table.add_column(str(column), justify="left" if column in ("by", "value") else "right")
        for line in errors.to_dict("records"):
            figures = (f"{line[name]:.1f}" for name in ("mean", "median", "p90", "bias"))
            table.add_row(
                line["by"], line["value"], f"{line['rows']:,}", f"{100 * line['coverage']:.0f} %", *figures
            )
        console.print(table)
