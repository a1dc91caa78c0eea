"""The time series of a run that is too long to keep its tables: sums in intervals of equal length."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from sim.metrics.bins import Bins
from sim.metrics.definitions import times
from sim.records.table import AnyTable, Table, column

MAX_INTERVALS: Final = 4096
_LOG_WIDTH: Final = 20
"""Binary logarithm of the ticks of the narrowest interval, 1 s."""

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
_MEANS: Final = {"running": "running", "waiting": "waiting", "kv_tokens": "kv_tokens_used"}
"""Columns of the table of iterations, by that of the series."""


class LoadSeries:
    """Sums over the rows of requests and iterations, by intervals of simulated time.

    The table is the same, bit for bit, in whatever order and parts the rows come.

    An interval is 1 s long, or 2, 4, 8 s ..., so that a run has at most `MAX_INTERVALS`. A row counts as a
    whole in the interval of its time, also an iteration that ends in a later one.
    """

    def __init__(self) -> None:
        self._bins = Bins(max_bins=MAX_INTERVALS, log_width=_LOG_WIDTH)

    def add(self, requests: AnyTable, iterations: AnyTable) -> None:
        """Adds rows of requests, with `request_metrics`, and of iterations."""
        count = self._bins.count
        arrival_s, first_s, end_s = (
            times(requests, f"{name}_s") for name in ("arrival", "first_token", "finished")
        )
        count("arrivals", arrival_s)
        count("prompt_tokens", arrival_s, column(requests, "prompt_tokens"))
        count("first_tokens", first_s)
        count("ttft_s", first_s, _steps("ttft_s", times(requests, "ttft_s")))
        count("ends", end_s)
        count("output_tokens", end_s, column(requests, "output_tokens"))
        if "slo_met" in requests:
            count("slo_met", end_s, column(requests, "slo_met", np.int64))
        start_s, duration_s = times(iterations, "start_s"), times(iterations, "duration_s")
        count("iterations", start_s)
        count("busy_s", start_s, _steps("busy_s", duration_s))
        for name, kept in _MEANS.items():
            count(name, start_s, _steps(name, column(iterations, kept) * duration_s))

    def merge(self, other: LoadSeries) -> None:
        """Adds the rows of other, which is not changed."""
        self._bins.merge(other._bins)

    def table(self) -> Table:
        """Returns one row per interval, from the start of the run to the last one with a row."""
        bins = self._bins
        size = max(map(len, bins.sums.values()), default=0)
        whole: dict[str, NDArray[Any]] = {name: bins.of(name, size) for name in COLUMNS}
        for name, steps in _STEPS.items():
            whole[name] = whole[name] / steps
        with np.errstate(invalid="ignore", divide="ignore"):
            whole["ttft_s"] = whole["ttft_s"] / whole["first_tokens"]
        for name in _MEANS:
            whole[name] = whole[name] / bins.width_s
        return Table({"start_s": np.arange(size) * bins.width_s, **whole})


def _steps(name: str, values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the values of a column in its steps, as whole numbers."""
    return np.rint(values * _STEPS[name])
