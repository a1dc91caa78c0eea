"""Figures about the SLO: how many requests kept it, by term, over time and by length of the prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.subplots import make_subplots

from sim.metrics.series import octaves
from sim.metrics.slo import Slo
from sim.metrics.window import Window
from sim.report import numbers
from sim.report.look import BLUE, GREEN, LIMIT, ORANGE, PURPLE, styled, time_unit

NUM_TIME_BUCKETS = 60
TERM_COLOURS = {"ttft": ORANGE, "tpot": PURPLE, "e2e": GREEN}


def slo_attainment(measured: pd.DataFrame, window: Window, slo: Slo) -> go.Figure:
    """Three panels: all requests by term, by time of arrival, by octave of prompt length; needs a request."""
    held = {"all terms": measured["slo_met"].to_numpy(dtype=np.bool_)}
    held |= {term.upper(): met for term, met in slo.terms_met(measured).items()}
    colours = dict(zip(held, [BLUE, *(TERM_COLOURS[term] for term in slo.limits_s)], strict=True))
    titles = ("all requests", "by time of arrival", "by prompt length")
    figure = make_subplots(1, 3, subplot_titles=titles, shared_yaxes=True, column_widths=[0.2, 0.45, 0.35])

    whole = [float(met.mean()) for met in held.values()]
    bars = go.Bar(
        x=list(held),
        y=[100 * share for share in whole],
        marker={"color": list(colours.values())},
        text=[numbers.percent_at_least(share) for share in whole],
        textposition="auto",
        insidetextanchor="middle",
        showlegend=False,
    )
    figure.add_trace(bars, 1, 1)

    arrival_s = measured["arrival_s"].to_numpy(dtype=np.float64)
    divisor, unit = time_unit(window.end_s)
    width_s = max(window.duration_s, 1e-9) / NUM_TIME_BUCKETS
    time, time_of = np.unique(((arrival_s - window.start_s) // width_s).astype(np.int64), return_inverse=True)
    middle = (window.start_s + (time + 0.5) * width_s) / divisor
    lengths, length_of = octaves(measured["prompt_tokens"].to_numpy(dtype=np.int64))
    arrivals = np.bincount(length_of, minlength=len(lengths))
    for name, met in held.items():
        style: dict[str, Any] = {
            "line": {"color": colours[name], "width": 2.5 if name == "all terms" else 1.2}
        }
        style |= {"mode": "lines+markers", "marker": {"size": 4}, "legendgroup": name, "name": name}
        by_time, by_length = _shares(met, time_of, len(time)), _shares(met, length_of, len(lengths))
        figure.add_trace(go.Scatter(x=middle, y=100 * by_time, **style), 1, 2)
        style |= {"showlegend": False, "customdata": arrivals}
        style |= {"hovertemplate": "%{y:.1f} % of %{customdata:,} requests"}
        figure.add_trace(go.Scatter(x=lengths * 2**0.5, y=100 * by_length, **style), 1, 3)
    figure.add_hline(y=100 * slo.attainment_target, line=LIMIT)
    figure.update_xaxes(title=unit, row=1, col=2)
    figure.update_xaxes(title="prompt tokens", type="log", row=1, col=3)
    figure.update_yaxes(range=[0, 102])
    figure.update_yaxes(title="% of requests", row=1, col=1)
    return styled(figure, height_px=400, legend={"orientation": "h", "y": -0.18, "yanchor": "top", "x": 0.25})


def _shares(met: NDArray[np.bool_], group: NDArray[np.int64], num_groups: int) -> NDArray[np.float64]:
    members = np.bincount(group, minlength=num_groups)
    return np.asarray(np.bincount(group, weights=met, minlength=num_groups) / members, dtype=np.float64)
