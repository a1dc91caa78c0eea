"""Computes the resources that limit a service: the time of its requests by resource.

A request either waits, for a recorded cause, or runs in an iteration, in which each operator is bound by
compute, memory bandwidth, the interconnect, kernel launches or the host (`IterationModel.explain`). The
shares are means over the requests, relative to the mean time from arrival to end; waiting for the current
iteration counts as running. The resource with the largest share is the limiting one.

Example: requests wait 4 s for KV blocks, then run for 4 s; a third of each iteration is bound by compute, the
rest by memory: KV memory 50 %, memory bandwidth 33 %, compute 17 %.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations import IterationModel, IterationShape, UnknownIterationError
from sim.metrics.definitions import Window, times
from sim.metrics.figure import one_shape, seconds_inside
from sim.metrics.result import RunResult
from sim.records.event_rows import WAITS
from sim.records.run import RunRecords
from sim.records.table import column

SAMPLES = 24
"""Number of iterations analysed by `explain`, evenly spaced over the busy time."""

BOUNDS = {
    "compute": "compute",
    "memory": "memory bandwidth",
    "communication": "interconnect",
    "launch": "kernel launches",
    "host": "host",
}
WANTED = {
    "gateway": "replicas",
    "frontend": "frontend",
    "slot": "sequence slots",
    "budget": "token budget",
    "memory": "KV memory",
    "policy": "policy",
    "adapter": "adapter slots",
    "load": "KV transfers",
}
"""Resource that a waiting request lacks, by waiting cause."""
UNKNOWN = "iterations"
"""Name of the resource if the hardware model cannot tell the bound of an iteration."""


def time_shares(result: RunResult) -> dict[str, float]:
    """Computes resource -> share of the requests' time, largest first, with sum 1; empty without requests."""
    trimmed = result.summary["trimmed"]
    window = Window(trimmed["start_s"], trimmed["end_s"])
    table = result.requests[window.holds(column(result.requests, "arrival_s"))]
    table = table[column(table, "status") != "rejected"]
    ended_s = times(table, "finished_s")
    ended_s = np.where(np.isnan(ended_s), result.records.end_s, ended_s)
    total_s = float((ended_s - times(table, "arrival_s")).sum())
    if not len(table) or total_s <= 0:
        return {}
    shares: dict[str, float] = defaultdict(float)
    for cause in ("gateway", *WAITS):
        if cause in WANTED and f"wait_{cause}_s" in table:
            shares[WANTED[cause]] += float(times(table, f"wait_{cause}_s").sum()) / total_s
    running = max(0.0, 1 - sum(shares.values()))
    for name, share in _bounds(result, window).items():
        shares[name] += running * share
    whole = sum(shares.values())
    found = {name: share / whole for name, share in shares.items() if share > 0}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def _bounds(result: RunResult, window: Window) -> dict[str, float]:
    """Computes the shares of the busy time by the resource that bounds it; they sum to 1."""
    records = result.records
    rows = _spread(seconds_inside(records.iterations, window))
    shares: dict[str, float] = defaultdict(float)
    for row in rows.tolist():
        model = result.models[records.pool_by_replica[column(records.iterations, "replica")[row]]]
        try:
            for line in model.explain(_shape(records, row, model)):
                shares[BOUNDS[line.bound]] += line.share / len(rows)
        except UnknownIterationError:
            shares[UNKNOWN] += 1 / len(rows)
    return shares or {UNKNOWN: 1.0}


def _spread(inside_s: NDArray[np.float64]) -> NDArray[np.int64]:
    """Returns the rows of the iterations in the middle of each of `SAMPLES` equal parts of the busy time."""
    until_s = np.cumsum(inside_s)
    if not len(until_s) or until_s[-1] <= 0:
        return np.zeros(0, np.int64)
    middles = (np.arange(SAMPLES) + 0.5) / SAMPLES * until_s[-1]
    return np.asarray(np.minimum(np.searchsorted(until_s, middles), len(until_s) - 1), dtype=np.int64)


def _shape(records: RunRecords, row: int, model: IterationModel) -> IterationShape:
    shape = one_shape(records.iterations, row, model)
    if shape.adapters is not None and not shape.adapters.tokens:
        return shape._replace(adapters=None)
    return shape
