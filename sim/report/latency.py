"""Plots latencies: their distributions, and TTFT against the length of the prompt."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.definitions import Counts, Times, weighted_percentile
from sim.metrics.series import cdf_points, octaves, thinned
from sim.metrics.slo import Slo
from sim.metrics.window import Window
from sim.records.run import RunRecords
from sim.report.chart import Chart, panels
from sim.report.look import BLUE, LIMIT, ORANGE, RED, log_axis
from sim.report.numbers import number

MARKED = (50, 99)
"""Percentiles that are marked on distributions."""
MAX_SCATTER_POINTS = 3000


class Curve(NamedTuple):
    """Points of a distribution (value, share of values <= it), and its `MARKED` percentiles."""

    values_s: Times
    share: Times
    marked_s: Times


def latency_cdfs(records: RunRecords, measured: pd.DataFrame, window: Window, slo: Slo | None) -> Chart:
    """Plots the cumulative share of requests (ITL: of gaps between tokens) for each of the four latencies.

    p50 and p99 are marked on each curve.
    """
    inside = window.holds(records.gap_end_s)
    gaps = records.gap_s[inside], records.gap_count[inside]
    series: dict[str, tuple[Times, Counts | None]] = {
        name: gaps if name == "itl" else (measured[f"{name}_s"].to_numpy(dtype=np.float64), None)
        for name in ("ttft", "tpot", "itl", "e2e")
    }
    curves = {
        name: Curve(*cdf_points(times_s, counts), marked_percentiles(times_s, counts))
        for name, (times_s, counts) in series.items()
    }
    return drawn_cdfs(curves, slo)


def drawn_cdfs(curves: Mapping[str, Curve], slo: Slo | None) -> Chart:
    """Plots the distributions of latencies, by name."""
    limits_ms = {name: limit_s * 1e3 for name, limit_s in slo.limits_s.items()} if slo else {}
    titles = [
        f"{name.upper()}, limit {limits_ms[name]:g} ms" if name in limits_ms else name.upper()
        for name in curves
    ]
    chart = panels(titles, num_columns=2, vertical_spacing=0.2)
    for panel, (name, (values_s, share, marked_s)) in enumerate(curves.items()):
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
        _mark(chart, panel, 1e3 * marked_s, shown_ms)
    chart.y_axes(title="% of requests", range=[0, 101])
    chart.y_axes(2, title="% of gaps")
    return chart.styled(height_px=600, showlegend=False)


def marked_percentiles(times_s: Times, counts: Counts | None = None) -> Times:
    """Returns the `MARKED` percentiles of the times, none if there are no times; NaN is left out."""
    known = ~np.isnan(times_s)
    if not known.any():
        return np.array([])
    counts = np.ones(len(times_s), np.int64) if counts is None else counts
    return weighted_percentile(times_s[known], counts[known], MARKED)


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


def ttft_by_prompt_length(measured: pd.DataFrame, slo: Slo | None) -> Chart:
    """Plots one point per request, and the median and p99 for each octave of prompt lengths.

    Of more than `MAX_SCATTER_POINTS` requests a part is drawn, always with the slowest ones.
    """
    started = measured[measured["ttft_s"].notna()]
    lengths = started["prompt_tokens"].to_numpy(dtype=np.int64)
    ttft_ms = started["ttft_s"].to_numpy(dtype=np.float64) * 1e3
    shown = thinned(ttft_ms, max_points=MAX_SCATTER_POINTS)
    lower, index = octaves(lengths)
    of_octave = [ttft_ms[index == i] for i in range(len(lower))]
    heights = [weighted_percentile(v, np.ones(len(v), np.int64), MARKED) for v in of_octave]
    return drawn_ttft((lengths[shown], ttft_ms[shown]), lengths, ttft_ms, lower, heights, slo)


def drawn_ttft(
    points: tuple[NDArray[Any], Times],
    lengths: NDArray[Any],
    ttft_ms: Times,
    lower: NDArray[Any],
    heights: Sequence[Times],
    slo: Slo | None,
) -> Chart:
    """Plots points of requests, and the `MARKED` percentiles of octaves in ms, which begin with `lower`.

    The axes have room for lengths and ttft_ms.
    """
    chart = Chart()
    marker = {"color": BLUE, "size": 4, "opacity": 0.35}
    chart.add("scatter", x=points[0], y=points[1], mode="markers", marker=marker, name="request")
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
