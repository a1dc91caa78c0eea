"""Plots the run over time: requests running and waiting, KV blocks in use, batch size, throughput."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.kept_tokens import kept_over_time
from sim.metrics.series import mean_and_max_over_time, rate_over_time
from sim.metrics.utilisation import batch_tokens
from sim.metrics.window import Window
from sim.records.run import RunRecords
from sim.report.chart import Chart, panels
from sim.report.look import BLUE, GREEN, ORANGE, PURPLE, SERIES, time_unit

NUM_STATE_BUCKETS = 500
NUM_RATE_BUCKETS = 200
MAX_REPLICAS_APART = 2
"""With more replicas, their mean and their maximum are drawn instead of two lines for each."""


class _State(NamedTuple):
    """A panel: its title and the column of the iterations that it shows, times a scale."""

    title: str
    column: str
    scale: NDArray[np.float64] | float = 1.0
    """One factor for all replicas, or one for each."""


class StateCurves(NamedTuple):
    """A panel of a state: its title, the times of its points in s, and (mean, maximum) by replica."""

    title: str
    middle_s: NDArray[np.float64]
    curves: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]]


class Rate(NamedTuple):
    """A line of events per second: its name and colour, the times of its points in s, and their heights."""

    name: str
    colour: str
    middle_s: NDArray[np.float64]
    per_s: NDArray[np.float64]


STATES = ("requests running", "requests waiting", "KV blocks in use, %", "tokens in the batch")
"""Titles of the panels of states."""


def timeline(records: RunRecords, window: Window) -> Chart | None:
    """Plots seven panels over one time axis; returns None for a run of 0 s. Trimmed time is shaded."""
    if not records.end_s > 0:
        return None
    blocks = 100 / records.by_replica("num_kv_blocks")
    columns = ("running", "waiting", "kv_blocks_used", "batch_tokens")
    shown = [_State(title, column) for title, column in zip(STATES, columns, strict=True)]
    shown[2] = shown[2]._replace(scale=blocks)
    states = [_curves(records, state) for state in shown]
    return drawn_timeline(states, _rates(records), records.end_s, window)


def drawn_timeline(
    states: Sequence[StateCurves], rates: Mapping[str, Sequence[Rate]], end_s: float, window: Window
) -> Chart:
    """Plots the panels of states, then those of rates by title, for a run that ends at end_s > 0."""
    divisor, unit = time_unit(end_s)
    titles = [*(state.title for state in states), *(f"{title}, all replicas" for title in rates)]
    chart = panels(titles, share_x=True, vertical_spacing=0.03)
    for panel, state in enumerate(states):
        for trace in _state_traces(state, divisor, show_legend=panel == 0):
            chart.add("scatter", panel, **trace)
    for panel, lines in enumerate(rates.values(), start=len(states)):
        for name, colour, middle_s, per_s in lines:
            line = {"color": colour, "width": 1.5}
            chart.add("scatter", panel, **_line(middle_s / divisor, per_s, name, line))
    for start_s, stop_s in ((0.0, window.start_s), (window.end_s, end_s)):
        if stop_s > start_s:
            shade = {"fillcolor": "#2d3748", "opacity": 0.08, "line": {"width": 0}}
            chart.vertical_band(start_s / divisor, stop_s / divisor, **shade)
    chart.x_axes(len(titles) - 1, title=f"simulated {unit}")
    chart.x_axes(range=[0, end_s / divisor])
    chart.y_axes(rangemode="tozero")
    return chart.styled(
        height_px=1230,
        legend={"orientation": "h", "y": -0.055, "yanchor": "top", "x": 0},
        hovermode="x unified",
    )


def _curves(records: RunRecords, state: _State) -> StateCurves:
    """Returns the curves of each replica, or of all together if there are many; idle ones count as 0."""
    edges_s = np.linspace(0.0, records.end_s, NUM_STATE_BUCKETS + 1)
    num_replicas = records.num_replicas
    scales = np.broadcast_to(state.scale, num_replicas)
    has_many = num_replicas > MAX_REPLICAS_APART
    curves = [
        mean_and_max_over_time(
            rows["start_s"].to_numpy(dtype=np.float64),
            rows["duration_s"].to_numpy(dtype=np.float64),
            _quantity(rows, state.column) * scale,
            edges_s,
        )
        for rows, scale in _by_replica(records, scales, only_used=has_many)
    ]
    if has_many:
        zero = np.zeros(NUM_STATE_BUCKETS)
        means, maxima = zip(*curves, strict=True) if curves else ((zero,), (zero,))
        named = {"all replicas": (np.sum(means, axis=0) / num_replicas, np.max(maxima, axis=0))}
    else:
        named = (
            {f"replica {i}": curve for i, curve in enumerate(curves)} if len(curves) > 1 else {"": curves[0]}
        )
    return StateCurves(state.title, (edges_s[:-1] + edges_s[1:]) / 2, named)


def _state_traces(state: StateCurves, divisor: float, *, show_legend: bool) -> list[dict[str, Any]]:
    middle, traces = state.middle_s / divisor, []
    for (name, (mean, highest)), colour in zip(state.curves.items(), SERIES, strict=False):
        for label, height, line in (
            ("maximum", highest, {"color": colour, "width": 0.8, "dash": "dot"}),
            ("mean", mean, {"color": colour, "width": 1.8}),
        ):
            full = f"{name} {label}".strip()
            traces.append(_line(middle, height, full, line, showlegend=show_legend, legendgroup=full))
    return traces


def _rates(records: RunRecords) -> dict[str, list[Rate]]:
    """Returns the lines of the rate panels by title; output has its own, as input rates are much higher."""
    edges_s = np.linspace(0.0, records.end_s, NUM_RATE_BUCKETS + 1)
    middle_s = (edges_s[:-1] + edges_s[1:]) / 2
    requests = records.requests
    first_s = requests["first_token_s"].to_numpy(dtype=np.float64)
    finished_s = requests.loc[requests["status"] == "finished", "finished_s"].to_numpy(dtype=np.float64)
    output = rate_over_time(first_s, None, edges_s) + rate_over_time(
        records.gap_end_s, records.gap_count, edges_s
    )
    kept_s, kept = kept_over_time(records)
    if len(kept):
        output += rate_over_time(kept_s, kept, edges_s)
    input_ = rate_over_time(first_s, requests["prompt_tokens"].to_numpy(), edges_s)
    arrivals = rate_over_time(requests["arrival_s"].to_numpy(), None, edges_s)
    finished = rate_over_time(finished_s, None, edges_s)

    return rate_panels(
        Rate("output tokens", BLUE, middle_s, output),
        Rate("input tokens", PURPLE, middle_s, input_),
        Rate("arrivals", ORANGE, middle_s, arrivals),
        Rate("finished", GREEN, middle_s, finished),
    )


def rate_panels(output: Rate, input_: Rate, arrivals: Rate, finished: Rate) -> dict[str, list[Rate]]:
    """Returns the lines of the rate panels by title."""
    return {"output tokens/s": [output], "input tokens/s": [input_], "requests/s": [arrivals, finished]}


def _by_replica(
    records: RunRecords, scales: NDArray[np.float64], *, only_used: bool
) -> Iterator[tuple[pd.DataFrame, float]]:
    """Yields the iterations of each replica and its scale; only_used: of those that have some."""
    replica = records.iterations["replica"].to_numpy()
    borders = np.searchsorted(replica, np.arange(records.num_replicas + 1))
    for scale, (first, behind) in zip(scales.tolist(), pairwise(borders.tolist()), strict=True):
        if behind > first or not only_used:
            yield records.iterations.iloc[first:behind], scale


def _quantity(rows: pd.DataFrame, column: str) -> NDArray[np.float64]:
    if column == "batch_tokens":
        return batch_tokens(rows).astype(np.float64)
    return rows[column].to_numpy(dtype=np.float64)


def _line(
    x: NDArray[np.float64], y: NDArray[np.float64], name: str, line: dict[str, Any], **more: Any
) -> dict[str, Any]:
    # Seven digits are enough for a screen and halve the file.
    points = {"x": x.astype(np.float32), "y": y.astype(np.float32)}
    return {**points, "name": name, "mode": "lines", "line": line, **more}
