"""Plots latencies: their distributions, and TTFT against the length of the prompt."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sim.metrics.definitions import weighted_percentile
from sim.metrics.series import cdf_points, octaves, thinned
from sim.metrics.slo import Slo
from sim.metrics.window import Window
from sim.records.run import RunRecords
from sim.report.chart import Chart, panels
from sim.report.look import BLUE, LIMIT, ORANGE, RED

MAX_SCATTER_POINTS = 3000


def latency_cdfs(records: RunRecords, measured: pd.DataFrame, window: Window, slo: Slo | None) -> Chart:
    """Plots the cumulative share of requests (ITL: of gaps between tokens) for each of the four latencies."""
    inside = window.holds(records.gap_end_s)
    series = {
        "ttft": ("TTFT", cdf_points(measured["ttft_s"].to_numpy())),
        "tpot": ("TPOT", cdf_points(measured["tpot_s"].to_numpy())),
        "itl": ("ITL", cdf_points(records.gap_s[inside], records.gap_count[inside])),
        "e2e": ("E2E", cdf_points(measured["e2e_s"].to_numpy())),
    }
    limits_s = slo.limits_s if slo else {}
    titles = [
        f"{label}, limit {limits_s[name] * 1e3:g} ms" if name in limits_s else label
        for name, (label, _) in series.items()
    ]
    chart = panels(titles, num_columns=2, vertical_spacing=0.17)
    for panel, (name, (label, (values_s, share))) in enumerate(series.items()):
        chart.add(
            "scatter",
            panel,
            x=values_s * 1e3,
            y=share * 100,
            name=label,
            mode="lines" if len(values_s) > 1 else "markers",
            line={"color": BLUE, "width": 2, "shape": "hv"},
            hovertemplate="%{y:.2f} % within %{x:,.4g} ms<extra></extra>",
        )
        if name in limits_s:
            chart.vertical_line(limits_s[name] * 1e3, LIMIT, panel)
    chart.x_axes(type="log", title="ms")
    chart.y_axes(title="% of requests", range=[0, 101])
    chart.y_axes(2, title="% of gaps")
    return chart.styled(height_px=600, showlegend=False)


def ttft_by_prompt_length(measured: pd.DataFrame, slo: Slo | None) -> Chart:
    """Plots one point per request, and the median and p99 for each octave of prompt lengths.

    Of more than `MAX_SCATTER_POINTS` requests a part is drawn, always with the slowest ones.
    """
    started = measured[measured["ttft_s"].notna()]
    lengths = started["prompt_tokens"].to_numpy(dtype=np.int64)
    ttft_ms = started["ttft_s"].to_numpy(dtype=np.float64) * 1e3
    chart = Chart()
    shown = thinned(ttft_ms, max_points=MAX_SCATTER_POINTS)
    marker = {"color": BLUE, "size": 4, "opacity": 0.35}
    chart.add("scatter", x=lengths[shown], y=ttft_ms[shown], mode="markers", marker=marker, name="request")
    lower, index = octaves(lengths)
    of_octave = [ttft_ms[index == i] for i in range(len(lower))]
    for q, label, colour in ((50, "median", ORANGE), (99, "p99", RED)):
        heights = [float(weighted_percentile(v, np.ones(len(v), np.int64), [q])[0]) for v in of_octave]
        # The middle of an octave, on a logarithmic axis, is sqrt(2) times its lower end.
        line = {"color": colour, "width": 2}
        chart.add("scatter", x=lower * 2**0.5, y=heights, mode="lines+markers", line=line, name=label)
    if slo and "ttft" in slo.limits_s:
        chart.horizontal_line(slo.limits_s["ttft"] * 1e3, LIMIT)
    chart.update_traces(hovertemplate="%{x:,.0f} prompt tokens, %{y:,.4g} ms")
    chart.x_axes(type="log", title="prompt tokens")
    chart.y_axes(type="log", title="TTFT, ms")
    return chart.styled(height_px=420)
