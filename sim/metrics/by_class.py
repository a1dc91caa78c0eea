"""Computes the figures of a run for each class of requests: by priority and by tenant.

If all requests are of one class, the summary of the run already describes it. ITL and output tokens/s are
missing here because the records of gaps between tokens do not name the request.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics import definitions
from sim.metrics.slo import Slo, goodput
from sim.metrics.window import Window

MAX_CLASSES = 20
"""Classes that are reported for each kind: those with the most requests. A service may have many tenants."""
COUNTS = ("arrived", "finished", "rejected", "aborted", "unfinished")
LATENCIES = ("ttft", "tpot", "e2e", "queue")


def figures_by_class(table: pd.DataFrame, window: Window, slo: Slo | None) -> dict[str, Any]:
    """Returns by_priority and by_tenant, each a dictionary from a class to its figures.

    A kind is left out if all requests are of one class. table: `request_metrics` of the whole run. Counts by
    status cover the whole run, as in the summary; latencies, shares and preemptions cover the requests that
    arrived in the window, rates the events in the window. Priorities are sorted from the smallest, which is
    served first, tenants by their number of requests, largest first.

    Example: with 3 requests of priority 0 and one of priority 7, by_priority is {"0": ..., "7": ...}.
    """
    found = {}
    for kind in ("priority", "tenant"):
        classes = table[kind].to_numpy() if kind in table else np.zeros(0)
        if len(classes) and (classes != classes[0]).any():
            numbers, names = pd.factorize(classes)
            size = np.bincount(numbers)
            largest = sorted(range(len(names)), key=lambda i: (-size[i], names[i]))[:MAX_CLASSES]
            if kind == "priority":
                largest.sort(key=lambda i: names[i])
            found[f"by_{kind}"] = {str(names[i]): _figures(table[numbers == i], window, slo) for i in largest}
    return found


def _figures(table: pd.DataFrame, window: Window, slo: Slo | None) -> dict[str, Any]:
    """Computes the figures of one class. Rates are per second of the window; NaN if the window is empty."""
    measured = table[window.holds(_times(table, "arrival_s"))]
    status = table["status"].to_numpy()
    finished_inside = window.holds(_times(table, "finished_s")) & (status == "finished")
    input_tokens = table["prompt_tokens"].to_numpy()[window.holds(_times(table, "first_token_s"))].sum()
    seconds = window.duration_s if window.duration_s > 0 else float("nan")
    return {
        "requests": {
            name: int((status == name).sum()) if name != "arrived" else len(table) for name in COUNTS
        },
        **{name: definitions.describe(_times(measured, f"{name}_s")) for name in LATENCIES},
        "throughput": {
            "requests_per_s": int(finished_inside.sum()) / seconds,
            "input_tokens_per_s": int(input_tokens) / seconds,
        },
        "goodput": None if slo is None else goodput(table, measured, window, slo),
        "preemptions": int(measured["preemptions"].sum()),
    }


def _times(table: pd.DataFrame, name: str) -> NDArray[np.float64]:
    return table[name].to_numpy(dtype=np.float64)
