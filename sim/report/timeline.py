"""Plots the run over time: requests running and waiting, KV blocks in use, batch size, throughput."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Window
from sim.metrics.plots import MAX_REPLICAS_APART, Plots
from sim.records.run import RunRecords
from sim.report.chart import BLUE, GREEN, ORANGE, PURPLE, SERIES, Chart, panels, time_unit

STATES = ("requests running", "requests waiting", "KV blocks in use, %", "tokens in the batch")
"""Titles of the panels of states, in the order of `PlotFigures.states`."""
RATES = {
    "output tokens/s": {"output tokens": ("tokens", BLUE)},
    "input tokens/s": {"input tokens": ("input_tokens", PURPLE)},
    "requests/s": {"arrivals": ("arrivals", ORANGE), "finished": ("finished", GREEN)},
}
"""Panels of rates by title: the lines by name, each with its events of `PlotFigures.whole_run` and colour.

Output has its own panel, as input rates are much higher.
"""
Curves = dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
"""Mean and maximum of a state by replica, in each bin."""


def timeline(plots: Plots, end: RunRecords, window: Window) -> Chart | None:
    """Plots seven panels over one time axis; returns None for a run of 0 s. Trimmed time is shaded."""
    end_s = end.end_s
    if not end_s > 0:
        return None
    divisor, unit = time_unit(end_s)
    titles = [*STATES, *(f"{title}, all replicas" for title in RATES)]
    chart = panels(titles, share_x=True, vertical_spacing=0.03)
    width_s = plots.figures.states.width_s
    starts_s = np.arange(plots.figures.states.num_bins, dtype=np.float64) * width_s
    for panel, curves in enumerate(_curves(plots, end, starts_s)):
        middle = (starts_s + width_s / 2) / divisor
        for trace in _state_traces(curves, middle, show_legend=panel == 0):
            chart.add("scatter", panel, **trace)
    rates = plots.figures.whole_run
    num_bins = max(int(end_s / rates.width_s), 0)  # those that end before the run
    middle_s = (np.arange(num_bins, dtype=np.float64) + 0.5) * rates.width_s
    for panel, lines in enumerate(RATES.values(), start=len(STATES)):
        for name, (key, colour) in lines.items():
            line = {"color": colour, "width": 1.5}
            per_s = rates.of(key, num_bins) / rates.width_s
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


def _curves(plots: Plots, end: RunRecords, starts_s: NDArray[np.float64]) -> Iterator[Curves]:
    """Yields the curves of each state: of each replica, or of all together if there are many."""
    states, num_replicas = plots.figures.states, end.num_replicas
    # The last interval is shorter if the run ends in it.
    width_s = np.clip(end.end_s - starts_s, 1e-9, states.width_s)
    for integral, highest in zip(states.integrals, states.maxima, strict=True):
        mean = integral / width_s
        if num_replicas > MAX_REPLICAS_APART:
            yield {"all replicas": (mean.sum(axis=0) / num_replicas, highest.max(axis=0))}
        else:
            names = [f"replica {i}" for i in range(num_replicas)] if num_replicas > 1 else [""]
            yield {name: (mean[i], highest[i]) for i, name in enumerate(names)}


def _state_traces(curves: Curves, middle: NDArray[np.float64], *, show_legend: bool) -> list[dict[str, Any]]:
    traces = []
    for (name, (mean, highest)), colour in zip(curves.items(), SERIES, strict=False):
        for label, height, line in (
            ("maximum", highest, {"color": colour, "width": 0.8, "dash": "dot"}),
            ("mean", mean, {"color": colour, "width": 1.8}),
        ):
            full = f"{name} {label}".strip()
            traces.append(_line(middle, height, full, line, showlegend=show_legend, legendgroup=full))
    return traces


def _line(
    x: NDArray[np.float64], y: NDArray[np.float64], name: str, line: dict[str, Any], **more: Any
) -> dict[str, Any]:
    # Seven digits are enough for a screen and halve the file.
    points = {"x": x.astype(np.float32), "y": y.astype(np.float32)}
    return {**points, "name": name, "mode": "lines", "line": line, **more}
