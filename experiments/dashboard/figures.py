"""Figures and sentences of the page: latencies, curves over the request rate, roofline, caveats."""

from __future__ import annotations

from dataclasses import fields

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from experiments.dashboard.simulation_service import Answer, Curve
from experiments.report.roofline.chart import roofline
from experiments.report.roofline.survey import RooflineSettings, survey
from hwmodels.iterations import UnknownIterationError
from sim.cluster.early_stop import overload_of
from sim.metrics.definitions import times
from sim.metrics.limiting import time_shares
from sim.report import numbers, wording
from sim.report.chart import BLUE, GREY, LIMIT, ORANGE, styled
from sim.report.plots import latency_cdfs
from sim.setup.deployment import Deployment

CURVE_PX, ROOFLINE_PX, LATENCY_PX = 300, 420, 540


def latency_figure(answer: Answer) -> go.Figure | None:
    """Draws cumulative distributions of latencies with the SLO's limits; None if no request was measured."""
    result = answer.result
    plots = result.plots()
    if not plots.figures.octaves:
        return None
    chart = latency_cdfs(plots, result.slo)
    return chart.styled(height_px=LATENCY_PX).figure()


def curve_figure(curve: Curve) -> go.Figure | None:
    """Draws SLO attainment and cost over the request rate; None for a workload without a rate."""
    answer = curve.answer
    if answer.rate_per_s is None:
        return None
    points = sorted(curve.points.values())
    rates = [answer.rate_per_s * point.load for point in points]
    sizes = [13 if point.load == 1 else 7 for point in points]
    drawing = make_subplots(1, 2, subplot_titles=["SLO attainment, %", "$ per million output tokens"])
    shares = [None if point.share is None else 100 * point.share for point in points]
    costs = [point.usd_per_million_output_tokens for point in points]
    for column, (values, colour) in enumerate(((shares, BLUE), (costs, ORANGE)), start=1):
        line = go.Scatter(
            x=rates,
            y=values,
            mode="lines+markers",
            line={"color": colour, "width": 2},
            marker={"size": sizes},
            hovertemplate="%{x:.3g} requests/s: %{y:.4g}<extra></extra>",
        )
        drawing.add_trace(line, row=1, col=column)
    if answer.result.slo is not None:
        drawing.add_hline(y=100 * answer.result.slo.attainment_target, line=LIMIT, row=1, col=1)
    drawing.add_vline(x=answer.rate_per_s, line={"color": GREY, "dash": "dot", "width": 1})
    drawing.update_xaxes(title="requests/s", range=[0, 3.1 * answer.rate_per_s])
    drawing.update_yaxes(rangemode="tozero")
    drawing.update_yaxes(range=[0, 102], row=1, col=1)
    return styled(drawing, height_px=CURVE_PX, showlegend=False)


def roofline_figure(answer: Answer) -> go.Figure | None:
    """Draws the roofline of the first pool at the traffic's mean lengths.

    Returns None if the latency model does not know the parts of an iteration. Raises ValueError if the
    lengths cannot be surveyed.
    """
    pool = next(iter(answer.scenario.pools_by_name.values()))
    table = answer.result.requests
    prompt = max(1, round(float(table["prompt_tokens"].mean())))
    half_output = max(0, round(float(table["output_tokens"].mean()) / 2))
    limit = pool.model.max_position_embeddings
    own = {field.name: getattr(pool, field.name) for field in fields(Deployment)}
    try:
        settings = RooflineSettings(
            **own, prompt=min(prompt, limit), context=min(prompt + half_output, limit), out=None
        )
        figure = roofline(survey(settings))
    except UnknownIterationError:
        return None
    legend = {"orientation": "h", "x": 0, "y": -0.2, "yanchor": "top"}
    return figure.update_layout(height=ROOFLINE_PX, legend=legend)


def limit_sentence(answer: Answer) -> str:
    """Returns a sentence with the shares of the requests' time; empty if there are none."""
    shares = [(name, share) for name, share in time_shares(answer.result).items() if share >= 0.05]
    shares_text = ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares)
    return f"Shares of the requests' time: {shares_text}." if shares_text else ""


def caveats(answer: Answer) -> list[str]:
    """Returns warnings about the results, overload first."""
    table = answer.result.requests
    moments = (times(table, f"{name}_s") for name in ("arrival", "scheduled", "finished"))
    found = overload_of(*moments)
    lines = wording.caveats(answer.result.summary)
    if found is None:
        return lines
    return [
        f"Overloaded: since {numbers.seconds(found.since_s)}, {found.arrivals_per_s:.3g} requests/s arrived "
        f"and {found.ends_per_s:.3g} finished; {found.outstanding:,} were outstanding at "
        f"{numbers.seconds(found.at_s)}. "
        "The backlog grows as long as the traffic lasts, so latencies depend on the length of the run.",
        *lines,
    ]
