"""Plots the time of the replicas by kind of iteration and by component, and iteration times by batch size."""

from __future__ import annotations

import numpy as np

from sim.metrics.definitions import Window
from sim.metrics.plots import Plots
from sim.metrics.utilisation import KINDS, rented_s
from sim.records.run import RunRecords
from sim.report.chart import COMPONENT_COLOURS, GREY, KIND_COLOURS, Chart, log_axis


def time_by_kind(plots: Plots, end: RunRecords, window: Window) -> Chart:
    """Plots stacked bars: shares of the replicas' time by kind of iteration and component, and idle time."""
    seconds, busy_s = plots.figures.times.seconds(), plots.figures.times.busy_s
    replica_s = float(rented_s(end, window).sum())
    replica_s = max(replica_s, 1e-12)
    components = dict.fromkeys(component for parts in seconds.values() for component in parts)
    rows = ["idle", *reversed(KINDS)]
    chart = Chart()
    for component, colour in zip(components, COMPONENT_COLOURS, strict=False):
        share = [100 * seconds.get(kind, {}).get(component, 0.0) / replica_s for kind in rows]
        chart.add("bar", y=rows, x=share, name=component, orientation="h", marker={"color": colour})
    idle_s = max(replica_s - busy_s, 0.0)
    idle = [100 * idle_s / replica_s, *(0.0 for _ in KINDS)]
    chart.add("bar", y=rows, x=idle, name="idle", orientation="h", marker={"color": "#dde2ea"})
    chart.update_traces(hovertemplate="%{y}, %{fullData.name}: %{x:.2f} % of the time<extra></extra>")
    chart.x_axes(title="% of the replicas' time")
    return chart.styled(height_px=330, legend={"traceorder": "normal"}, barmode="stack")


def iteration_times(plots: Plots) -> Chart:
    """Plots one point per iteration: its duration against the tokens in its batch.

    Of many iterations a part is drawn, always with the longest ones.
    """
    points = [(x, 1e3 * y) for x, y in (kind.drawn() for kind in plots.figures.iterations.kinds)]
    tokens, duration_ms = (np.concatenate([pair[place] for pair in points]) for place in range(2))
    chart = Chart()
    for name, (x, y) in zip(KINDS, points, strict=True):
        marker = {"color": KIND_COLOURS.get(name, GREY), "size": 4, "opacity": 0.45}
        chart.add("scatter", x=x, y=y, mode="markers", marker=marker, name=name)
    chart.update_traces(hovertemplate="%{x:,} tokens, %{y:.4g} ms")
    chart.x_axes(**log_axis(tokens, max_labels=16), title="tokens in the batch")
    chart.y_axes(**log_axis(duration_ms), title="iteration time, ms")
    return chart.styled(height_px=330)
