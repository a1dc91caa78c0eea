"""Writes report.html of a run that keeps no whole tables: the plots that its accumulators can draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sim.metrics.folds.measured import MeasuredFold
from sim.metrics.series import cdf_points
from sim.metrics.slo import Slo
from sim.metrics.window import Window
from sim.report.chart import Chart, panels
from sim.report.latency import MARKED, Curve, drawn_cdfs
from sim.report.look import BLUE, GREEN, time_unit
from sim.report.page import Section, write_sections

LEFT_OUT = (
    "The plots of requests, KV blocks and batches over time, of iterations, and of TTFT by prompt length "
    "need whole tables, which this run did not keep."
)


def write_streamed_report(
    path: str | Path, measured: MeasuredFold, summary: dict[str, Any], config: dict[str, Any], slo: Slo | None
) -> None:
    """Writes the page of a run from its accumulators. summary: result of `RunFold.summary`."""
    write_sections(path, streamed_sections(measured, summary, slo), summary, config)


def streamed_sections(measured: MeasuredFold, summary: dict[str, Any], slo: Slo | None) -> list[Section]:
    """Returns the sections of the page from the top; none if nothing was served in the measured time."""
    curves = {}
    for name in ("ttft", "tpot", "itl", "e2e"):
        sketch = measured.sketches[name]
        marked_s = sketch.percentiles(MARKED) if sketch.count else np.array([])
        curves[name] = Curve(*cdf_points(*sketch.estimates()), marked_s)
    if not any(len(curve.values_s) for curve in curves.values()):
        return []
    caption = (
        "Share of the requests (ITL: of the gaps between tokens) with at most the latency on the x axis. "
        f"Points: p50 and p99. Dashed: the limit of the SLO. {LEFT_OUT}"
    )
    window = Window(summary["trimmed"]["start_s"], summary["trimmed"]["end_s"])
    return [
        Section("Latency", caption, drawn_cdfs(curves, slo)),
        Section("Over time", "Means over short intervals.", rates_over_time(measured, window)),
    ]


def rates_over_time(measured: MeasuredFold, window: Window) -> Chart | None:
    """Plots output tokens and finished requests per second; None if the window is shorter than a bin."""
    rates = measured.rates
    num_bins = int(window.duration_s / rates.width_s)
    if not num_bins:
        return None
    divisor, unit = time_unit(window.end_s)
    middle = (window.start_s + (np.arange(num_bins) + 0.5) * rates.width_s) / divisor
    chart = panels(["output tokens/s", "finished requests/s"], share_x=True, vertical_spacing=0.08)
    for panel, (name, label, colour) in enumerate(
        (("tokens", "output tokens", BLUE), ("finished", "finished", GREEN))
    ):
        y = rates.of(name, num_bins) / rates.width_s
        line = {"color": colour, "width": 1.5}
        points = {"x": middle.astype(np.float32), "y": y.astype(np.float32)}
        chart.add("scatter", panel, **points, name=label, mode="lines", line=line)
    chart.x_axes(1, title=f"simulated {unit}")
    chart.x_axes(range=[0, window.end_s / divisor])
    chart.y_axes(rangemode="tozero")
    return chart.styled(height_px=480, showlegend=False)
