"""Plots the time of the replicas by kind of iteration and by component, and iteration times by batch size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hwmodels.iterations.iteration import IterationModel
from sim.metrics.series import thinned
from sim.metrics.utilisation import KINDS, batch_tokens, iteration_kind, rented_s, seconds_by_kind
from sim.metrics.window import Window
from sim.records.run import RunRecords
from sim.report.chart import Chart
from sim.report.look import COMPONENT_COLOURS, GREY, KIND_COLOURS, log_axis

MAX_POINTS_PER_KIND = 1200


def time_by_kind(
    records: RunRecords, window: Window, inside_s: NDArray[np.float64], models: Sequence[IterationModel]
) -> Chart:
    """Plots stacked bars: shares of the replicas' time by kind of iteration and component, and idle time."""
    seconds = seconds_by_kind(records, inside_s, models)
    return drawn_time(seconds, float(inside_s.sum()), float(rented_s(records, window).sum()))


def drawn_time(seconds: Mapping[str, Mapping[str, float]], busy_s: float, replica_s: float) -> Chart:
    """Plots the bars of `time_by_kind`.

    seconds: by kind and component. busy_s: of all iterations. replica_s: that all replicas are paid for.
    """
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


def iteration_times(records: RunRecords, inside_s: NDArray[np.float64]) -> Chart:
    """Plots one point per iteration: its duration against the tokens in its batch.

    Of many iterations a part is drawn, always with the longest ones.
    """
    iterations = records.iterations[inside_s > 0]
    tokens = batch_tokens(iterations)
    duration_ms = iterations["duration_s"].to_numpy(dtype=np.float64) * 1e3
    kind = iteration_kind(iterations)
    drawn = []
    for i in range(len(KINDS)):
        of_kind = np.flatnonzero(kind == i)
        shown = of_kind[thinned(duration_ms[of_kind], max_points=MAX_POINTS_PER_KIND)]
        drawn.append((tokens[shown], duration_ms[shown]))
    return drawn_iterations(drawn, tokens, duration_ms)


def drawn_iterations(
    points: Sequence[tuple[NDArray[Any], NDArray[np.float64]]],
    tokens: NDArray[Any],
    duration_ms: NDArray[np.float64],
) -> Chart:
    """Plots the points of each kind of iterations; the axes have room for tokens and durations."""
    chart = Chart()
    for name, (x, y) in zip(KINDS, points, strict=True):
        marker = {"color": KIND_COLOURS.get(name, GREY), "size": 4, "opacity": 0.45}
        chart.add("scatter", x=x, y=y, mode="markers", marker=marker, name=name)
    chart.update_traces(hovertemplate="%{x:,} tokens, %{y:.4g} ms")
    chart.x_axes(**log_axis(tokens, max_labels=16), title="tokens in the batch")
    chart.y_axes(**log_axis(duration_ms), title="iteration time, ms")
    return chart.styled(height_px=330)
