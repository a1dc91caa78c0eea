"""Plots SLO attainment: the share of requests that met the SLO, by limit, over time and by prompt length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sim.metrics.definitions import Window
from sim.metrics.plots import ALL, Plots
from sim.metrics.slo import Slo
from sim.report import numbers
from sim.report.chart import BLUE, GREEN, GREY, LIMIT, ORANGE, PURPLE, RED, Chart, log_axis, panels, time_unit

NUM_TIME_BUCKETS = 60
TERM_COLOURS = {"ttft": ORANGE, "tpot": PURPLE, "e2e": GREEN, "publish": RED, "task": GREY}


def slo_attainment(plots: Plots, goodput: Mapping[str, Any], window: Window, slo: Slo) -> Chart:
    """Plots three panels: attainment by limit, by arrival time and by prompt length (in octaves).

    goodput: that of the summary. At least one request must have been measured.
    """
    figures = plots.figures
    whole = {ALL: goodput["share"]} | {term.upper(): one for term, one in goodput["term_shares"].items()}
    names = {ALL: ALL} | {term.upper(): term for term in slo.limits_s}
    middle_s, counts = figures.by_time.buckets(["requests", *names.values()], window.end_s, NUM_TIME_BUCKETS)
    some = np.flatnonzero(counts["requests"])
    octaves = dict(sorted(figures.octaves.items()))
    lengths, arrivals = np.array(list(octaves)), np.array([one.num for one in octaves.values()])
    colours = dict(zip(whole, [BLUE, *(TERM_COLOURS[term] for term in slo.limits_s)], strict=True))
    titles = ("all requests", "by arrival time", "by prompt length")
    chart = panels(titles, num_columns=3, share_y=True, column_widths=[0.2, 0.45, 0.35])

    chart.add(
        "bar",
        x=list(whole),
        y=[100 * share for share in whole.values()],
        marker={"color": list(colours.values())},
        text=[numbers.percent_at_least(share) for share in whole.values()],
        textposition="auto",
        textangle=0,
        insidetextanchor="middle",
        showlegend=False,
    )

    divisor, unit = time_unit(window.end_s)
    for name, key in names.items():
        by_time = counts[key][some] / counts["requests"][some]
        by_length = np.array([octave.met.get(key, 0) for octave in octaves.values()]) / arrivals
        style: dict[str, Any] = {"line": {"color": colours[name], "width": 2.5 if name == ALL else 1.2}}
        style |= {"mode": "lines+markers", "marker": {"size": 4}, "legendgroup": name, "name": name}
        chart.add("scatter", 1, x=middle_s[some] / divisor, y=100 * by_time, **style)
        style |= {"showlegend": False, "customdata": arrivals}
        style |= {"hovertemplate": "%{y:.1f} % of %{customdata:,} requests"}
        chart.add("scatter", 2, x=lengths * 2**0.5, y=100 * by_length, **style)
    chart.horizontal_line(100 * slo.attainment_target, LIMIT)
    chart.x_axes(1, title=unit)
    chart.x_axes(2, title="prompt tokens", **log_axis(lengths, max_labels=6))
    chart.y_axes(range=[0, 102])
    chart.y_axes(0, title="% of requests")
    return chart.styled(height_px=400, legend={"orientation": "h", "y": -0.25, "yanchor": "top", "x": 0})
