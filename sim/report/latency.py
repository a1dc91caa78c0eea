"""Plots latencies: their distributions, and TTFT against the length of the prompt."""

from __future__ import annotations

import math

import numpy as np

from sim.metrics.definitions import Times
from sim.metrics.plots import Plots
from sim.metrics.series import cdf_points
from sim.metrics.slo import Slo
from sim.report.chart import BLUE, LIMIT, ORANGE, RED, Chart, log_axis, panels
from sim.report.numbers import number

MARKED = (50, 99)
"""Percentiles that are marked on distributions."""
NOTHING = np.array([])


def latency_cdfs(plots: Plots, slo: Slo | None) -> Chart:
    """Plots the cumulative share of requests (ITL: of gaps between tokens) for each of the four latencies.

    p50 and p99 are marked on each curve.
    """
    limits_ms = {name: limit_s * 1e3 for name, limit_s in slo.limits_s.items()} if slo else {}
    titles = [
        f"{name.upper()}, limit {limits_ms[name]:g} ms" if name in limits_ms else name.upper()
        for name in plots.latencies
    ]
    chart = panels(titles, num_columns=2, vertical_spacing=0.2)
    for panel, (name, latency) in enumerate(plots.latencies.items()):
        values_s, share = cdf_points(*latency.points())
        shown_ms = values_s * 1e3
        chart.add(
            "scatter",
            panel,
            x=shown_ms,
            y=share * 100,
            name=name.upper(),
            mode="lines" if len(values_s) > 1 else "markers",
            line={"color": BLUE, "width": 2, "shape": "hv"},
            hovertemplate="%{y:.2f} % within %{x:,.4g} ms<extra></extra>",
        )
        if name in limits_ms:
            chart.vertical_line(limits_ms[name], LIMIT, panel)
            shown_ms = np.append(shown_ms, limits_ms[name])
        chart.x_axes(panel, **log_axis(shown_ms), title="ms")
        _mark(chart, panel, 1e3 * latency.percentiles(MARKED) if latency.count else NOTHING, shown_ms)
    chart.y_axes(title="% of requests", range=[0, 101])
    chart.y_axes(2, title="% of gaps")
    return chart.styled(height_px=600, showlegend=False)


def _mark(chart: Chart, panel: int, marked_ms: Times, shown_ms: Times) -> None:
    """Marks percentiles on a curve, and writes them beside it where there is room."""
    if not len(marked_ms):
        return
    marker = {"color": BLUE, "size": 7, "line": {"color": "white", "width": 1}}
    hover = "p%{y}: %{x:,.4g} ms<extra></extra>"
    chart.add("scatter", panel, x=marked_ms, y=MARKED, mode="markers", marker=marker, hovertemplate=hover)
    positive = shown_ms[shown_ms > 0]
    for q, value_ms in zip(MARKED, marked_ms, strict=True):
        if not value_ms > 0:  # a logarithmic axis has no place for it
            continue
        place = math.log(value_ms / positive.min()) / max(math.log(positive.max() / positive.min()), 1e-9)
        anchor = (
            "left" if place < (0.65 if q > 90 else 0.5) else "center" if q > 90 and place < 0.88 else "right"
        )
        chart.note(
            math.log10(value_ms),
            q,
            f"p{q} {number(float(value_ms))} ms",
            panel,
            xanchor=anchor,
            yanchor="top" if q > 90 else "middle",
            xshift={"left": 8, "center": 0, "right": -8}[anchor],
            yshift=-6 if q > 90 else 0,
            bgcolor="rgba(255,255,255,0.75)",
            font={"size": 11},
        )


def ttft_by_prompt_length(plots: Plots, slo: Slo | None) -> Chart:
    """Plots one point per request, and the median and p99 for each octave of prompt lengths.

    Of many requests a part is drawn, always with the slowest ones.
    """
    lengths, ttft_s = plots.figures.requests.drawn()
    ttft_ms = 1e3 * ttft_s
    begun = {lower: one.ttft for lower, one in sorted(plots.figures.octaves.items()) if one.ttft.count}
    lower, heights = np.array(list(begun)), [1e3 * ttft.percentiles(MARKED) for ttft in begun.values()]
    chart = Chart()
    marker = {"color": BLUE, "size": 4, "opacity": 0.35}
    chart.add("scatter", x=lengths, y=ttft_ms, mode="markers", marker=marker, name="request")
    for place, (label, colour) in enumerate((("median", ORANGE), ("p99", RED))):
        # The middle of an octave, on a logarithmic axis, is sqrt(2) times its lower end.
        line = {"color": colour, "width": 2}
        y = [float(both[place]) for both in heights]
        chart.add("scatter", x=lower * 2**0.5, y=y, mode="lines+markers", line=line, name=label)
    if slo and "ttft" in slo.limits_s:
        limit_ms = slo.limits_s["ttft"] * 1e3
        chart.horizontal_line(limit_ms, LIMIT)
        ttft_ms = np.append(ttft_ms, limit_ms)
    chart.update_traces(hovertemplate="%{x:,.0f} prompt tokens, %{y:,.4g} ms")
    chart.x_axes(**log_axis(lengths, max_labels=16), title="prompt tokens")
    chart.y_axes(**log_axis(ttft_ms), title="TTFT, ms")
    return chart.styled(height_px=420)
