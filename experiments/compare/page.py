"""Page compare.html: verdicts, a figure, the tables, the settings that differ, and the configuration."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from experiments.compare.results import Comparison, Results
from experiments.compare.sentences import caveats, verdicts
from experiments.compare.tables import metric_rows
from experiments.study.figures import Metric, titled, unit_of
from experiments.study.pages import differing_rows, last_sections, line_style, settings_text
from experiments.study.runs import Point
from experiments.study.study import Page
from experiments.study.verdicts import LEVEL
from sim.report.chart import styled
from sim.report.plain_page import line_with_band, listed, table

COLUMNS = 2
ROW_PX = 340


def page_of(found: Results, points: Sequence[Point], config: Mapping[str, Any]) -> Page:
    """Returns the page. config: of the comparison."""
    experiment = found.experiment
    source = f" Source: {experiment.source}." if experiment.source else ""
    seeds = f"with each of {len(experiment.seeds)} seeds" if len(experiment.seeds) > 1 else "with one seed"
    means = "Means over seeds"
    if found.traced:
        seeds, means = "of a trace, once", "Figures of the trace"
    introduction = (
        f"{experiment.claim}{source} Every arm serves the same traffic {seeds}. Each {LEVEL} is for one "
        "comparison: of 20 comparisons of equal arms, about one appears to differ by chance."
    )
    tables = "".join(
        f"<h3>{html.escape(titled(metric))}</h3>{table(metric_rows(found, metric))}"
        for metric in experiment.metrics
    )
    return Page(
        experiment.title,
        introduction,
        {
            "Verdicts": listed([*caveats(found), *verdicts(found)]),
            "Figures": [f"<p>{means}, each with its {LEVEL}. Axes start at 0.</p>", figure(found)],
            "Comparisons": tables,
            "Settings that differ between the arms": _differences(found, points),
            **last_sections(found.runs.notes, _configuration(found, points, config)),
        },
    )


def figure(found: Results) -> go.Figure:
    """Draws one panel per metric: lines over the swept values, or one bar per arm without a sweep."""
    experiment = found.experiment
    rows = math.ceil(len(experiment.metrics) / COLUMNS)
    gap = 0.3 / rows if rows > 1 else 0.0
    titles = [titled(metric) for metric in experiment.metrics]
    drawing = make_subplots(rows, COLUMNS, subplot_titles=titles, vertical_spacing=gap)
    for i, metric in enumerate(experiment.metrics):
        where = {"row": i // COLUMNS + 1, "col": i % COLUMNS + 1}
        for j, arm in enumerate(experiment.arms):
            along, style = found.of(metric, arm), line_style(j)
            traces = _line(along, style, i == 0) if experiment.sweep else _bar(along[0], style)
            for trace in traces:
                drawing.add_trace(trace, **where)
        if experiment.sweep:
            drawing.update_xaxes(title=experiment.sweep.label or experiment.sweep.key, **where)
        drawing.update_yaxes(rangemode="tozero", **where)
    return styled(
        drawing,
        height_px=ROW_PX * rows + 60,
        showlegend=experiment.sweep is not None,
        # The legend is above the titles of the panels.
        legend={"orientation": "h", "y": 1.0 + 40 / (ROW_PX * rows), "yanchor": "bottom", "x": 0},
        margin={"l": 64, "r": 20, "t": 80, "b": 48},
    )


def _bar(comparison: Comparison, style: Mapping[str, str]) -> list[go.Bar]:
    mean, low, high = _in_unit(comparison.mean[:3], comparison.metric)
    error = None if math.isnan(low) else {"type": "data", "array": [high - mean], "color": "#2d3748"}
    if math.isnan(mean):
        return []
    return [
        go.Bar(
            x=[comparison.arm],
            y=[mean],
            error_y=error,
            marker={"color": style["color"]},
            name=comparison.arm,
            showlegend=False,
            hovertemplate=f"{comparison.arm}: %{{y:,.4g}}<extra></extra>",
        )
    ]


def _line(along: Sequence[Comparison], style: Mapping[str, str], legend: bool) -> list[go.Scatter]:
    """Draws the mean, and a band between the bounds of its interval."""
    x = [c.swept if isinstance(c.swept, int | float) else str(c.swept) for c in along]
    factor, _ = unit_of(along[0].metric)
    return line_with_band(x, [c.mean for c in along], along[0].arm, style, factor=factor, legend=legend)


def _in_unit(values: Sequence[float], metric: Metric) -> list[float]:
    factor, _ = unit_of(metric)
    return [factor * value for value in values]


def _differences(found: Results, points: Sequence[Point]) -> str:
    at = [point for point in points if point.swept == found.experiment.swept[0]]
    rows = differing_rows(at)
    return table(rows) if len(rows) > 1 else "<p>None: all arms have the same settings.</p>"


def _configuration(found: Results, points: Sequence[Point], config: Mapping[str, Any]) -> str:
    baseline = next(point for point in points if point.arm == found.experiment.baseline)
    return settings_text("Settings of the comparison", config, "open") + settings_text(
        f"Settings of a run of {baseline.arm}, as for windtunnel simulate", baseline.config
    )
