"""Exact percentiles of a run without whole tables, from the rows of its requests on the disk.

One column is read at a time, 8 bytes per request, so that 10^8 requests take 0.8 GB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.dataset
from numpy.typing import NDArray

from sim.metrics.definitions import PERCENTILES, Window, plain_json, speeds_of
from sim.metrics.distributions import Values
from sim.metrics.measured import speed_figures

LATENCIES = ("ttft", "tpot", "e2e", "queue")


def add_exact_percentiles(summary: dict[str, Any], requests: Path) -> None:
    """Replaces the estimated percentiles of `LATENCIES` and of the speed of users by exact ones.

    summary: of a run that streams. requests: the folder of its requests. Those of ITL, of
    classes and of what clients see stay estimates, because the folder has no gaps.
    """
    window = Window(summary["trimmed"]["start_s"], summary["trimmed"]["end_s"])
    table = pyarrow.dataset.dataset(requests, format="parquet")
    measured = window.holds(_column(table, "arrival_s"))
    for name in LATENCIES:
        values = _column(table, f"{name}_s")[measured]
        if name == "tpot":
            speed = Values()
            speed.add(speeds_of(values))
            summary["per_user"] = plain_json(speed_figures(speed))
        values = values[~np.isnan(values)]
        if len(values):
            found = np.percentile(values, PERCENTILES, overwrite_input=True).tolist()
            summary[name] |= {f"p{q}_s": p for q, p in zip(PERCENTILES, found, strict=True)}
    if "clients" not in summary:
        summary["publish"] = summary["ttft"]
    summary["exact_percentiles"] = [*LATENCIES, "per_user"]


def _column(table: pyarrow.dataset.Dataset, name: str) -> NDArray[np.float64]:
    values: NDArray[np.float64] = (
        table.to_table(columns=[name])[name].to_numpy().astype(np.float64, copy=False)
    )
    return values
