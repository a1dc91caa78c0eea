"""Compares predicted with measured values: relative errors of rows, and their statistics per group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

PERCENT = 100.0
SHARE = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Relative errors, predicted / measured - 1, in percent or as shares; NaN if no row has a prediction."""

    rows: int
    """Number of measured rows."""
    coverage: float
    """Share of measured rows with a prediction; NaN without a measured row."""
    mean: float
    """Mean absolute error."""
    median: float
    """Median absolute error."""
    p90: float
    """90th percentile of the absolute error."""
    bias: float
    """Median signed error; > 0: predictions are too high."""
    low: float
    """10th percentile of the signed error."""
    high: float
    """90th percentile of the signed error."""
    total: float
    """Error of the sum of all predicted rows."""


def relative_errors(
    predicted: ArrayLike, measured: ArrayLike, *, unit: float = PERCENT
) -> NDArray[np.float64]:
    """Returns predicted / measured - 1 of each row, in percent or as shares; NaN without both values."""
    return np.asarray(unit * (np.asarray(predicted, np.float64) / np.asarray(measured, np.float64) - 1))


def errors(predicted: ArrayLike, measured: ArrayLike, *, unit: float = PERCENT) -> Errors:
    """Computes the errors of the measured rows; a missing prediction (NaN) lowers the coverage only.

    unit: `PERCENT`, or `SHARE` for errors such as 0.05.
    """
    ours, theirs = np.asarray(predicted, np.float64), np.asarray(measured, np.float64)
    is_measured = ~np.isnan(theirs)
    is_compared = is_measured & ~np.isnan(ours)
    ours, theirs = ours[is_compared], theirs[is_compared]
    num_measured = int(is_measured.sum())
    coverage = len(ours) / num_measured if num_measured else np.nan
    if not len(ours):
        names = ("mean", "median", "p90", "bias", "low", "high", "total")
        return Errors(rows=num_measured, coverage=coverage, **dict.fromkeys(names, np.nan))
    signed = relative_errors(ours, theirs, unit=unit)
    absolute = np.abs(signed)
    median, p90 = np.percentile(absolute, [50, 90]).tolist()
    low, bias, high = np.percentile(signed, [10, 50, 90]).tolist()
    return Errors(
        rows=num_measured,
        coverage=coverage,
        mean=float(absolute.mean()),
        median=median,
        p90=p90,
        bias=bias,
        low=low,
        high=high,
        total=float(unit * (ours.sum() / theirs.sum() - 1)),
    )


def errors_of_groups(
    rows: pd.DataFrame, predicted: str, measured: str, groups: Sequence[str] = ()
) -> Iterator[tuple[str, Any, Errors]]:
    """Yields the errors of all rows, then per value of each group column, without groups of no measured row.

    Items are (column, value, errors); all rows are ("all", "", errors). predicted, measured: columns.
    """
    known = rows[rows[measured].notna()]
    parts: list[tuple[str, Any, pd.DataFrame]] = [("all", "", known)]
    for group in groups:
        if group in known:
            parts += [(group, value, part) for value, part in known.groupby(group)]
    for group, value, part in parts:
        if len(part):
            yield group, value, errors(part[predicted], part[measured])
