"""The same figures for each class of requests apart: by priority, and by tenant.

One class is what the whole summary is about already. ITL and output tokens a second are missing: gaps between
tokens are recorded by when they ended, not by whose they were.
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
"""Of each kind; those with the most requests. A service may have more tenants than a summary has lines."""
COUNTS = ("arrived", "finished", "rejected", "aborted", "unfinished")
LATENCIES = ("ttft", "tpot", "e2e", "queue")


def figures_by_class(table: pd.DataFrame, window: Window, slo: Slo | None) -> dict[str, Any]:
    """by_priority and by_tenant, each class -> its figures; nothing where there is one class only.

    table: `request_metrics` of the whole run. Counts by status are of the whole run, as in the summary;
    latencies, shares and preemptions are of the requests that arrived in the window, rates of what happened
    there. Priorities go from the smallest, which is served first, tenants from the one with most requests.

    Priority 0 has 3 requests, priority 7 one: by_priority is {"0": ..., "7": ...}.
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
    """Of one class. Rates are per second of the window; NaN if it is empty."""
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
