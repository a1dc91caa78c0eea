"""Computes the figures of a run for each class of requests: by priority and by tenant.

If all requests are of one class, the summary of the run already describes it. ITL and output tokens/s are
missing here because the records of gaps between tokens do not name the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics import definitions
from sim.metrics.slo import Slo, add_goodput, goodput_figures
from sim.metrics.sums import TableTotals, Totals
from sim.metrics.window import Window

KINDS = ("priority", "tenant")
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
    for kind in KINDS:
        classes = table[kind].to_numpy() if kind in table else np.zeros(0)
        if len(classes) and (classes != classes[0]).any():
            numbers, names = pd.factorize(classes)
            size = dict(zip(names.tolist(), np.bincount(numbers).tolist(), strict=True))
            places = {name: index for index, name in enumerate(names.tolist())}
            found[f"by_{kind}"] = {
                str(name): _figures(table[numbers == places[name]], window, slo)
                for name in largest_classes(kind, size)
            }
    return found


def largest_classes(kind: str, size: Mapping[Any, int]) -> list[Any]:
    """Returns the classes that are reported, in their order. size: number of requests by class."""
    largest = sorted(size, key=lambda name: (-size[name], name))[:MAX_CLASSES]
    return sorted(largest) if kind == "priority" else largest


def _figures(table: pd.DataFrame, window: Window, slo: Slo | None) -> dict[str, Any]:
    """Computes the figures of one class. Rates are per second of the window; NaN if the window is empty."""
    measured = table[window.holds(_times(table, "arrival_s"))]
    totals = TableTotals()
    add_status_counts(totals, table)
    add_class(totals, table, measured, window, slo)
    latencies = {name: definitions.describe(_times(measured, f"{name}_s")) for name in LATENCIES}
    return class_figures(totals, totals, latencies, window, slo)


def add_status_counts(totals: Totals, requests: pd.DataFrame) -> None:
    """Adds the number of requests and their numbers by status."""
    status = requests["status"].to_numpy()
    totals.add("arrived", np.ones(len(requests), np.bool_))
    for name in COUNTS[1:]:
        totals.add(name, np.asarray(status == name, np.bool_))


def add_class(
    totals: Totals, table: pd.DataFrame, measured: pd.DataFrame, window: Window, slo: Slo | None
) -> None:
    """Adds the counts of one class of requests inside the window. measured: its rows that arrived there."""
    finished = table["status"].to_numpy() == "finished"
    totals.add("finished_inside", window.holds(_times(table, "finished_s")) & finished)
    first_inside = window.holds(_times(table, "first_token_s"))
    totals.add("input_tokens", table["prompt_tokens"].to_numpy()[first_inside])
    totals.add("preemptions", measured["preemptions"].to_numpy())
    if slo is not None:
        add_goodput(totals, table, measured, window, slo)


def class_figures(
    whole: Totals,
    inside: Totals,
    latencies: Mapping[str, dict[str, float | int]],
    window: Window,
    slo: Slo | None,
) -> dict[str, Any]:
    """Returns the figures of one class from its counts and the statistics of its `LATENCIES`.

    whole: counts over the whole run; inside: over the window.
    """
    seconds = window.duration_s if window.duration_s > 0 else float("nan")
    return {
        "requests": {name: whole[name] for name in COUNTS},
        **latencies,
        "throughput": {
            "requests_per_s": inside["finished_inside"] / seconds,
            "input_tokens_per_s": inside["input_tokens"] / seconds,
        },
        "goodput": None if slo is None else goodput_figures(inside, window, slo),
        "preemptions": inside["preemptions"],
    }


def _times(table: pd.DataFrame, name: str) -> NDArray[np.float64]:
    return table[name].to_numpy(dtype=np.float64)
