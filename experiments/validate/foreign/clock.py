"""Checks that the times of a recording are possible."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pandas as pd

MOMENTS = ("arrival_s", "scheduled_s", "first_token_s", "last_token_s", "finished_s")
"""Times of a request, in the order in which they happen."""

ROUNDING_S = 1.001e-6
"""Tolerance for times that are written with six decimals."""


def check_requests(table: pd.DataFrame) -> None:
    """Raises ValueError with the row (1 is the first) if a request's times are out of order."""
    known = [name for name in MOMENTS if name in table]
    numbers = table["row"].to_numpy() if "row" in table else np.arange(1, len(table) + 1)
    for number, row in zip(numbers.tolist(), table[known].itertuples(index=False), strict=True):
        happened = [
            (name, float(time_s)) for name, time_s in zip(known, row, strict=True) if time_s == time_s
        ]
        for (earlier, early_s), (later, late_s) in pairwise(happened):
            if late_s < early_s - ROUNDING_S:
                raise ValueError(
                    f"row {number}: the clock goes backwards: {later}={late_s:.6f} is before "
                    f"{earlier}={early_s:.6f}"
                )


def check_order(times_s: pd.Series, where: str) -> None:
    """Raises ValueError with the row (1 is the first) if a time is before that of the row above it."""
    steps_s = np.diff(times_s.to_numpy(dtype=np.float64))
    back = np.flatnonzero(steps_s < -ROUNDING_S)
    if len(back):
        row = int(back[0]) + 1
        raise ValueError(
            f"{where}, row {row + 1}: the clock goes backwards: {times_s.name}={times_s.iloc[row]:.6f} is "
            f"before {times_s.iloc[row - 1]:.6f} in the row above"
        )
