"""The time series of a run that is too long to keep its tables: sums in intervals of equal length."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, Final

import numpy as np
import pandas as pd
from numpy.typing import NDArray

FIRST_WIDTH_S: Final = 1.0
MAX_INTERVALS: Final = 4096

COLUMNS: Final = {
    "arrivals": "i8",  # requests that arrive in the interval
    "prompt_tokens": "i8",  # of these
    "first_tokens": "i8",  # requests that get their first token
    "ttft_s": "f8",  # mean over these
    "ends": "i8",  # requests that end, whatever their status
    "output_tokens": "i8",  # of these
    "slo_met": "i8",  # requests that end and meet the SLO
    "iterations": "i8",  # iterations that begin in the interval
    "busy_s": "f8",  # their duration, over all replicas
    "running": "f8",  # sequences in them times their duration, over the length of the interval
    "waiting": "f8",  # likewise, sequences that wait
    "kv_tokens": "f8",  # likewise, tokens with KV
}
"""Columns beside start_s, with their dtypes."""
_STEPS: Final = {
    "ttft_s": 2.0**32,
    "busy_s": 2.0**36,
    "running": 2.0**30,
    "waiting": 2.0**30,
    "kv_tokens": 2.0**20,
}
"""Steps per unit to which the values of columns that are no counts are rounded; an interval has up to 2^63.

Sums of steps are exact, so that they do not depend on the order of the rows, or on how a run was divided.
"""
_EXACT: Final = 2.0**53
"""Sums of integers below this one are exact as doubles."""
_MEANS: Final = {"running": "running", "waiting": "waiting", "kv_tokens": "kv_tokens_used"}
"""Columns of the table of iterations, by that of the series."""


class LoadSeries:
    """Sums over the rows of requests and iterations, by intervals of simulated time.

    The table is the same, bit for bit, in whatever order and parts the rows come.

    An interval is 1 s long, or 2, 4, 8 s ..., so that a run has at most `MAX_INTERVALS`. A row counts as a
    whole in the interval of its time, also an iteration that ends in a later one.
    """

    def __init__(self) -> None:
        self.width_s = FIRST_WIDTH_S
        self._sums = {name: np.zeros(0, np.int64) for name in COLUMNS}

    def add(self, requests: pd.DataFrame, iterations: pd.DataFrame) -> None:
        """Adds rows of requests, with `request_metrics`, and of iterations."""
        arrival_s, first_s, end_s = (
            requests[f"{name}_s"].to_numpy() for name in ("arrival", "first_token", "finished")
        )
        start_s, duration_s = iterations["start_s"].to_numpy(), iterations["duration_s"].to_numpy()
        self._widen(
            max(float(np.nanmax(times, initial=0.0)) for times in (arrival_s, first_s, end_s, start_s))
        )
        self._count(arrival_s, arrivals=None, prompt_tokens=requests["prompt_tokens"].to_numpy())
        self._count(first_s, first_tokens=None, ttft_s=requests["ttft_s"].to_numpy())
        met = requests["slo_met"].to_numpy(bool) if "slo_met" in requests else np.zeros(len(requests), bool)
        self._count(end_s, ends=None, output_tokens=requests["output_tokens"].to_numpy(), slo_met=met)
        weighted = {name: iterations[column].to_numpy() * duration_s for name, column in _MEANS.items()}
        self._count(start_s, iterations=None, busy_s=duration_s, **weighted)

    def merge(self, other: LoadSeries) -> None:
        """Adds the rows of other, which is not changed."""
        while self.width_s < other.width_s:
            self._double()
        added = deepcopy(other)
        while added.width_s < self.width_s:
            added._double()
        for name, sums in self._sums.items():
            total = np.zeros(max(len(sums), len(added._sums[name])), sums.dtype)
            total[: len(sums)] += sums
            total[: len(added._sums[name])] += added._sums[name]
            self._sums[name] = total

    def _widen(self, until_s: float) -> None:
        """Doubles the length of the intervals until there are few enough up to a time."""
        while until_s >= self.width_s * MAX_INTERVALS:
            self._double()

    def _double(self) -> None:
        """Doubles the length of the intervals."""
        self.width_s *= 2
        for name, sums in self._sums.items():
            self._sums[name] = np.append(sums, np.zeros(len(sums) % 2, sums.dtype)).reshape(-1, 2).sum(axis=1)

    def _count(self, time_s: NDArray[np.float64], **values: NDArray[Any] | None) -> None:
        """Adds the values of rows, or 1 for None, to the sums of the intervals of their times."""
        happened = ~np.isnan(time_s)
        at = (time_s[happened] / self.width_s).astype(np.int64)
        for name, each in values.items():
            sums = self._sums[name]
            if each is None:
                added = np.bincount(at, minlength=len(sums))
            else:
                own = each[happened]
                steps = np.rint(own * _STEPS[name]) if name in _STEPS else own.astype(np.float64)
                added = _exact_sums(at, steps, len(sums))
            added[: len(sums)] += sums
            self._sums[name] = added

    def table(self) -> pd.DataFrame:
        """Returns one row per interval, from the start of the run to the last one with a row."""
        size = max(len(sums) for sums in self._sums.values())
        whole: dict[str, NDArray[Any]] = {
            name: np.append(sums, np.zeros(size - len(sums), np.int64)) for name, sums in self._sums.items()
        }
        for name, steps in _STEPS.items():
            whole[name] = whole[name] / steps
        with np.errstate(invalid="ignore", divide="ignore"):
            whole["ttft_s"] = whole["ttft_s"] / whole["first_tokens"]
        for name in _MEANS:
            whole[name] = whole[name] / self.width_s
        return pd.DataFrame({"start_s": np.arange(size) * self.width_s, **whole})


def _exact_sums(at: NDArray[np.int64], values: NDArray[np.float64], num_intervals: int) -> NDArray[np.int64]:
    """Returns the sums of integers by their intervals, at least num_intervals. values: not negative, [N]."""
    sums = np.bincount(at, values, minlength=num_intervals)
    if len(at) > 1 and sums.max() >= _EXACT:
        half, size = len(at) // 2, len(sums)
        return _exact_sums(at[:half], values[:half], size) + _exact_sums(at[half:], values[half:], size)
    return sums.astype(np.int64)
