"""Computes the errors of predictions: absolute percentage errors, by groups of rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from experiments.study.errors import errors_of_groups

FIGURES = ("rows", "coverage", "mean", "median", "p90", "bias")
"""Columns of a table of errors."""

BANDS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
"""Limits of the concurrency bands."""


def errors_by_group(
    scored: pd.DataFrame, metrics: Sequence[str], groups: Sequence[str]
) -> dict[str, pd.DataFrame]:
    """Computes a table of errors per metric that has a measured column NAME and a predicted NAME_predicted.

    One row per group, with the columns by, value and `FIGURES` (`experiments.study.errors.Errors`).
    """
    return {
        metric: pd.DataFrame(
            [
                {"by": group, "value": str(value), **{name: getattr(found, name) for name in FIGURES}}
                for group, value, found in errors_of_groups(scored, f"{metric}_predicted", metric, groups)
            ]
        )
        for metric in metrics
        if metric in scored
    }


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
