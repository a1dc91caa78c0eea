"""Intervals of a study over a trace: its runs are the same with every seed, so blocks of it are resampled.

Only figures of single requests can be resampled: latencies, SLO attainment and, with the duration of the run
as it is, goodput. Throughput, cost and the use of the hardware belong to the whole run and have no interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from sim.metrics.blocks import MIN_BLOCKS, Statistic, blocks_of, figure_of
from sim.metrics.confidence import Interval, Paired
from sim.metrics.definitions import Window
from sim.metrics.result import RunResult
from sim.metrics.steady import MEAN, Figure, Values
from sim.records.table import to_pandas

GOODPUT = ("goodput.share", "goodput.requests_per_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceRun:
    """Values of the requests of one run, in order of arrival; NaN outside the measured window."""

    ids: tuple[int, ...]
    values: Mapping[str, Values]
    """ttft, tpot, e2e, ... in seconds; goodput: 1 for a request within the SLO, else 0."""

    @classmethod
    def of(cls, result: RunResult, counted: pd.DataFrame | None = None) -> TraceRun:
        """Returns the values of a run's requests. counted: those that count; None: of the measured window."""
        requests = to_pandas(result.requests).sort_values(["arrival_s", "request_id"], kind="stable")
        if counted is None:
            trimmed = result.summary["trimmed"]
            window = Window(trimmed["start_s"], trimmed["end_s"])
            inside = window.holds(requests["arrival_s"].to_numpy(np.float64))
        else:
            inside = requests.index.isin(counted.index)
        columns = {
            name.removesuffix("_s"): requests[name]
            for name in map(str, requests)
            if name.endswith("_s") and pd.api.types.is_float_dtype(requests[name])
        }
        if "slo_met" in requests:
            columns["goodput"] = requests["slo_met"]
        return cls(
            ids=tuple(requests["request_id"].tolist()),
            values={
                name: np.where(inside, column.to_numpy(np.float64), math.nan)
                for name, column in columns.items()
            },
        )

    def series(self, key: str) -> Values | None:
        """Returns the values of the requests from which a figure of summary.json follows; else None."""
        section, _, name = key.partition(".")
        if section == "goodput" and key not in GOODPUT:
            return None
        if section != "goodput" and figure_named(name) is None:
            return None
        return self.values.get(section)

    def statistic(self, key: str, value: float) -> Statistic | None:
        """Returns the function of some requests that computes a figure. value: that of the run."""
        values, section = self.series(key), key.partition(".")[0]
        if values is None:
            return None
        if section != "goodput":
            return figure_of(values, figure_named(key.partition(".")[2]) or MEAN)
        share = figure_of(values)(np.arange(len(values)))
        if key == "goodput.share" or not share > 0:
            return figure_of(values)
        return figure_of(values, times=value / share)


def figure_named(name: str) -> Figure | None:
    """Returns the statistic with a name in summary.json: mean_s, p99_s; None for others, such as max_s."""
    if name == "mean_s":
        return MEAN
    is_percentile = name.startswith("p") and name.endswith("_s") and name[1:-2].isdigit()
    return Figure(int(name[1:-2]) / 100) if is_percentile else None


def trace_interval(run: TraceRun, key: str, value: float, period: int | None = None) -> Interval:
    """Computes the interval of a figure of one run; without bounds for a figure that has none.

    period: number of requests after which the run repeats its trace; None: it does not.
    """
    values = run.series(key)
    if values is None:
        return Interval(value, math.nan, math.nan, 1)
    figure = MEAN if key in GOODPUT else figure_named(key.partition(".")[2]) or MEAN
    mean, low, high, count = blocks_of([values], period).of_values(values, figure)
    times = value / mean if key == "goodput.requests_per_s" and mean > 0 else 1.0
    return Interval(value, times * low, times * high, count)


def compare_traced(runs: Sequence[TraceRun], key: str, values: Sequence[float]) -> Paired | None:
    """Compares a figure of the first run with that of the second; None if it has no interval.

    It has none if it is not one of single requests, or the runs do not serve the same requests, or the trace
    has too few blocks (`num_pairs` is then 1).
    """
    series = [run.series(key) for run in runs]
    statistics = [run.statistic(key, value) for run, value in zip(runs, values, strict=True)]
    known = [one for one in series if one is not None]
    one, other = statistics
    if len(known) < len(runs) or one is None or other is None or runs[0].ids != runs[1].ids:
        return None
    found = blocks_of(known).compared(one, other)
    return replace(found, num_pairs=max(found.num_pairs, 2)) if found.same else found


def blocks_text(intervals: Sequence[Interval]) -> str:
    """Returns the sentence on the runs of a trace and their intervals, above the results of a study."""
    once = "The traffic is the same for every seed and nothing else is random, so there is one run of each"
    counts = sorted({one.num_values for one in intervals if one.num_values > 1 and not one.is_exact})
    if not counts:
        return (
            f"{once}, and no interval: the trace is too short, or too much of one trend, for {MIN_BLOCKS} "
            "independent blocks of requests; use a longer one."
        )
    of = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    return (
        f"{once}; intervals are from {of} blocks of consecutive requests (moving-block bootstrap). "
        "Figures of a whole run, such as cost and throughput, and those that follow one trend have none."
    )
