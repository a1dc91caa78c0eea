"""Tools that all fits share: split by groups of shapes, robust least squares in log space, error figures."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

Floats = NDArray[np.float64]


def validation_rows(columns: Mapping[str, Any], group_by: Sequence[str]) -> NDArray[np.bool_]:
    """Returns a mask of rows kept back from the fit: one group in four, the same ones every time.

    A group is all rows with the same values in the columns group_by (a GEMM's n and k, an attention's heads).
    """
    keys = zip(*(np.asarray(columns[name]).tolist() for name in group_by), strict=True)
    kept_back: dict[tuple[Any, ...], bool] = {}
    rows = []
    for key in keys:
        if key not in kept_back:
            kept_back[key] = zlib.crc32(repr(key).encode()) % 4 == 0
        rows.append(kept_back[key])
    return np.array(rows, dtype=np.bool_)


@dataclass(frozen=True, kw_only=True, slots=True)
class Errors:
    """Absolute percentage errors of predictions."""

    num_rows: int
    median: float
    p90: float
    bias: float
    """Median of predicted / measured - 1 in percent; > 0 means that predictions are too slow."""


def errors(predicted: Floats, measured: Floats) -> Errors:
    """Returns the errors of predictions. Raises ValueError if there are no rows."""
    if not len(measured):
        raise ValueError("no rows to compare")
    relative = 100 * (predicted / measured - 1)
    median, p90 = np.percentile(np.abs(relative), [50, 90])
    return Errors(
        num_rows=len(measured), median=float(median), p90=float(p90), bias=float(np.median(relative))
    )


def fit(
    predict: Callable[[Floats], Floats],
    measured: Floats,
    start: Floats,
    lower: Floats,
    upper: Floats,
    *,
    loss_scale: float = 0.1,
    weights: Floats | None = None,
) -> Floats:
    """Returns parameters between lower and upper that minimise log(predict / measured), robust to outliers.

    The loss is soft_l1 with scale loss_scale (0.1: errors beyond some 10 % count linearly). weights: per row.
    """
    log_measured = np.log(measured)
    root = np.ones_like(measured) if weights is None else np.sqrt(weights)

    def residuals(parameters: Floats) -> Floats:
        return np.asarray(root * (np.log(predict(parameters)) - log_measured))

    result = least_squares(
        residuals,
        np.clip(start, lower, upper),
        bounds=(lower, upper),
        x_scale="jac",
        loss="soft_l1",
        f_scale=loss_scale,
        diff_step=np.full(len(start), 1e-4),
    )
    return np.asarray(result.x)
