"""Page goodput.html: SLO attainment and goodput over the request rate, and attainment over scaled SLOs."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from experiments.goodput.answer import Outcome
from experiments.goodput.results import curve, goodput_curve, scale_curve
from experiments.goodput.tables import caveats, rows, sentences
from experiments.study.pages import COLOURS, last_sections, settings_text
from experiments.study.study import Page
from experiments.study.verdicts import LEVEL
from sim.report.chart import GREY, LIMIT, styled
from sim.report.plain_page import line_with_band, listed, table

HEIGHT_PX = 420
SHARES = [0, 1.03]
"""Range of an axis of shares; bands may exceed 1, which means nothing."""


def page_of(outcome: Outcome, config: Mapping[str, Any]) -> Page:
    """Returns the page. config: of the command."""
    settings = outcome.settings
    seeds = f"{len(settings.seeds)} seeds" if len(settings.seeds) > 1 else "one seed"
    return Page(
        "Goodput",
        f"SLO attainment and goodput (requests/s that meet the SLO) over the request rate, with {seeds}. "
        f"Bands are the {LEVEL} of the mean. Each seed has the same requests at every rate.",
        {
            "Verdicts": listed([*sentences(outcome.highest), *caveats(outcome)]),
            "SLO attainment and goodput over the request rate": [
                "<p>Open circles: the service was overloaded, and the run was stopped early.</p>",
                rate_figure(outcome),
            ],
            "SLO attainment with tighter and looser limits": [scale_figure(outcome)],
            "Highest rates": table(rows(outcome.highest)),
            **last_sections(outcome.notes, settings_text("Settings of the search", config)),
        },
    )


def rate_figure(outcome: Outcome) -> go.Figure:
    """Draws SLO attainment, with its target and each arm's highest rate, and goodput over the rate."""
    drawing = make_subplots(
        1, 2, subplot_titles=["SLO attainment", "goodput, requests/s"], horizontal_spacing=0.1
    )
    for i, arm in enumerate(outcome.arms):
        colour = COLOURS[i % len(COLOURS)]
        points = curve(outcome.found[arm.name])
        symbols = ["circle-open" if is_overloaded else "circle" for _, _, is_overloaded in points]
        for trace in line_with_band(
            [rate for rate, _, _ in points],
            [share for _, share, _ in points],
            arm.name,
            {"color": colour},
            symbols=symbols,
        ):
            drawing.add_trace(trace, row=1, col=1)
        goodput = goodput_curve(outcome.found[arm.name])
        for trace in line_with_band(
            [rate for rate, _ in goodput],
            [value for _, value in goodput],
            arm.name,
            {"color": colour},
            legend=False,
        ):
            drawing.add_trace(trace, row=1, col=2)
    for one in outcome.highest:
        if one.rate.mean > 0 and not one.is_open:
            drawing.add_vline(x=one.rate.mean, line={"dash": "dot", "width": 1, "color": GREY}, row=1, col=1)
    for target in {arm.target for arm in outcome.arms}:
        drawing.add_hline(y=target, line=LIMIT, row=1, col=1)
    drawing.update_xaxes(title="requests/s", rangemode="tozero")
    drawing.update_yaxes(rangemode="tozero")
    drawing.update_yaxes(range=SHARES, row=1, col=1)
    # The legend is above the titles of the panels.
    legend = {"orientation": "h", "y": 1.12, "yanchor": "bottom", "x": 0}
    return styled(drawing, height_px=HEIGHT_PX, legend=legend, margin={"l": 64, "r": 20, "t": 80, "b": 60})


def scale_figure(outcome: Outcome) -> go.Figure:
    """Draws SLO attainment over multiples of the SLO's limits, at one rate."""
    drawing = go.Figure()
    for i, arm in enumerate(outcome.arms):
        points = scale_curve(outcome.found[arm.name], outcome.settings.slo_scales)
        for trace in line_with_band(
            [scale for scale, _ in points],
            [share for _, share in points],
            arm.name,
            {"color": COLOURS[i % len(COLOURS)]},
        ):
            drawing.add_trace(trace)
    rate = outcome.scale_rate
    rate_text = "" if rate is None else f" at {rate:.4g} requests/s"
    drawing.update_xaxes(title=f"factor on all SLO limits{html.escape(rate_text)}", rangemode="tozero")
    drawing.update_yaxes(title="SLO attainment", range=SHARES)
    for target in {arm.target for arm in outcome.arms if not math.isnan(arm.target)}:
        drawing.add_hline(y=target, line=LIMIT)
    return styled(drawing, height_px=HEIGHT_PX)
