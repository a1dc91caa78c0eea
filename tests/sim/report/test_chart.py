"""Charts equal those of plotly's own classes with the same settings, to the last character."""

import json
import re

import numpy as np
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from sim.report.chart import LIMIT, Chart, panels, plotly_js, styled

CONFIG = {"displaylogo": False, "responsive": True}
LINE = {"width": 2, "color": "#2563a8", "shape": "hv"}


def plotlys(figure):
    return figure.to_html(full_html=False, include_plotlyjs=False, config=CONFIG)


def without_id(html):
    return re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", html)


def assert_same(chart, figure):
    assert without_id(chart.html(CONFIG)) == without_id(plotlys(figure))
    assert json.loads(chart.figure().to_json()) == json.loads(figure.to_json())


@pytest.mark.parametrize(
    "values",
    [
        np.array([1.5, np.nan, -np.inf]),
        np.array([1, 100]),
        np.array([1, 1_000]),
        np.array([-100_000, 1]),
        np.array([1, 2**40]),
        np.array([1.5], dtype=np.float32),
        np.array([3, 4], dtype=np.int32),
        np.array([True, False]),
        np.arange(8.0)[::2],
        np.array([]),
        [1.0, float("nan"), 3],
        ["a < b", "</script>", "40 % – 50 %"],
    ],
    ids=lambda values: f"{getattr(values, 'dtype', 'list')}-{len(values)}",
)
def test_values_are_written_as_plotly_writes_them(values):
    chart, figure = Chart(), go.Figure()
    chart.add("scatter", x=[1, 2, 3], customdata=values, line=LINE, marker=None, name="one")
    figure.add_trace(go.Scatter(x=[1, 2, 3], customdata=values, line=LINE, marker=None, name="one"))
    assert_same(chart.styled(height_px=300), styled(figure, height_px=300))


def test_one_panel():
    chart, figure = Chart(), go.Figure()
    chart.add("bar", y=["a", "b"], x=[1.0, 2.0], orientation="h", marker={"color": "red"})
    figure.add_trace(go.Bar(y=["a", "b"], x=[1.0, 2.0], orientation="h", marker={"color": "red"}))
    chart.horizontal_line(3.0, LIMIT)
    figure.add_hline(y=3.0, line=LIMIT)
    chart.vertical_line(4, LIMIT)
    figure.add_vline(x=4, line=LIMIT)
    chart.update_traces(hovertemplate="%{y}<extra></extra>")
    figure.update_traces(hovertemplate="%{y}<extra></extra>")
    chart.x_axes(title="seconds", range=[0, 1])
    figure.update_xaxes(title="seconds", range=[0, 1])
    assert_same(
        chart.styled(height_px=300, legend={"y": -1, "x": 2}, barmode="stack"),
        styled(figure, height_px=300, legend={"y": -1, "x": 2}, barmode="stack"),
    )


@pytest.mark.parametrize(
    ("num_columns", "ours", "theirs"),
    [
        (1, {"share_x": True, "vertical_spacing": 0.03}, {"shared_xaxes": True, "vertical_spacing": 0.03}),
        (2, {"vertical_spacing": 0.17}, {"vertical_spacing": 0.17}),
        (
            3,
            {"share_y": True, "column_widths": [0.2, 0.45, 0.35], "vertical_spacing": 0.1},
            {"shared_yaxes": True, "column_widths": [0.2, 0.45, 0.35], "vertical_spacing": 0.1},
        ),
    ],
)
def test_a_grid_of_panels(num_columns, ours, theirs):
    titles = [f"panel {i}" for i in range(6)]
    chart = panels(titles, num_columns=num_columns, **ours)
    figure = make_subplots(6 // num_columns, num_columns, subplot_titles=titles, **theirs)
    for i in range(6):
        chart.add("scatter", i, x=[1, i], y=[2, 3], mode="lines")
        row, col = i // num_columns + 1, i % num_columns + 1
        figure.add_trace(go.Scatter(x=[1, i], y=[2, 3], mode="lines"), row, col)
    chart.vertical_line(7.0, LIMIT, 5)
    figure.add_vline(x=7.0, line=LIMIT, row=6 // num_columns, col=num_columns)
    chart.horizontal_line(8.0, LIMIT)
    figure.add_hline(y=8.0, line=LIMIT)
    chart.vertical_band(1.0, 2.0, opacity=0.1, fillcolor="red", line={"width": 0})
    figure.add_vrect(x0=1.0, x1=2.0, opacity=0.1, fillcolor="red", line_width=0)
    chart.x_axes(0, title="first")
    figure.update_xaxes(title="first", row=1, col=1)
    chart.y_axes(type="log")
    figure.update_yaxes(type="log")
    assert_same(
        chart.styled(height_px=600, showlegend=False), styled(figure, height_px=600, showlegend=False)
    )


def test_the_code_is_plotlys_own():
    assert plotly_js().decode() == get_plotlyjs()
