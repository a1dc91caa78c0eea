"""Plots SLO attainment: the share of requests that met the SLO, by limit, over time and by prompt length."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from sim.metrics.series import octaves
from sim.metrics.slo import Slo
from sim.metrics.window import Window
from sim.report import numbers
from sim.report.chart import Chart, panels
from sim.report.look import BLUE, GREEN, GREY, LIMIT, ORANGE, PURPLE, RED, log_axis, time_unit

NUM_TIME_BUCKETS = 60
TERM_COLOURS = {"ttft": ORANGE, "tpot": PURPLE, "e2e": GREEN, "publish": RED, "task": GREY}


def slo_attainment(measured: pd.DataFrame, window: Window, slo: Slo) -> Chart:
    """Plots three panels: attainment by limit, by arrival time and by prompt length (in octaves).

    measured must have at least one request.
    """
    held = {"all limits": measured["slo_met"].to_numpy(dtype=np.bool_)}
    held |= {term.upper(): met for term, met in slo.terms_met(measured).items()}
    arrival_s = measured["arrival_s"].to_numpy(dtype=np.float64)
    width_s = max(window.duration_s, 1e-9) / NUM_TIME_BUCKETS
    time, time_of = np.unique(((arrival_s - window.start_s) // width_s).astype(np.int64), return_inverse=True)
    lengths, length_of = octaves(measured["prompt_tokens"].to_numpy(dtype=np.int64))
    return drawn_attainment(
        {name: float(met.mean()) for name, met in held.items()},
        Shares(
            window.start_s + (time + 0.5) * width_s,
            {name: _shares(met, time_of, len(time)) for name, met in held.items()},
        ),
        Shares(lengths, {name: _shares(met, length_of, len(lengths)) for name, met in held.items()}),
        np.bincount(length_of, minlength=len(lengths)),
        window,
        slo,
    )


class Shares(NamedTuple):
    """Shares of requests that met the SLO and each of its limits, by place on an axis."""

    place: NDArray[Any]
    """Middle of an interval of time in s, or the shortest prompt of an octave."""
    met: Mapping[str, NDArray[np.float64]]


def drawn_attainment(
    whole: Mapping[str, float],
    by_time: Shares,
    by_length: Shares,
    arrivals: NDArray[np.int64],
    window: Window,
    slo: Slo,
) -> Chart:
    """Plots the shares of `slo_attainment`. arrivals: requests of each octave."""
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
    middle, lengths = by_time.place / divisor, by_length.place
    for name in whole:
        style: dict[str, Any] = {
            "line": {"color": colours[name], "width": 2.5 if name == "all limits" else 1.2}
        }
        style |= {"mode": "lines+markers", "marker": {"size": 4}, "legendgroup": name, "name": name}
        chart.add("scatter", 1, x=middle, y=100 * by_time.met[name], **style)
        style |= {"showlegend": False, "customdata": arrivals}
        style |= {"hovertemplate": "%{y:.1f} % of %{customdata:,} requests"}
        chart.add("scatter", 2, x=lengths * 2**0.5, y=100 * by_length.met[name], **style)
    chart.horizontal_line(100 * slo.attainment_target, LIMIT)
    chart.x_axes(1, title=unit)
    chart.x_axes(2, title="prompt tokens", **log_axis(lengths, max_labels=6))
    chart.y_axes(range=[0, 102])
    chart.y_axes(0, title="% of requests")
    return chart.styled(height_px=400, legend={"orientation": "h", "y": -0.25, "yanchor": "top", "x": 0})


def _shares(met: NDArray[np.bool_], group: NDArray[np.int64], num_groups: int) -> NDArray[np.float64]:
    members = np.bincount(group, minlength=num_groups)
    return np.asarray(np.bincount(group, weights=met, minlength=num_groups) / members, dtype=np.float64)
