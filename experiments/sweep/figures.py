"""Draws a sweep: lines with bands in small multiples, heat maps of two axes, parallel coordinates."""

from __future__ import annotations

import html
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from experiments.study.figures import Metric, titled, unit_of
from experiments.study.pages import line_style
from experiments.study.pareto import front_line
from experiments.sweep.grid import MAX_PANELS, PARETO, Grid, GridAxis, panel_title
from sim.metrics.confidence import Interval
from sim.report.chart import log_axis, styled
from sim.report.plain_page import line_with_band

COLUMNS = 3
PANEL_PX = 290
MAX_LABELLED_CELLS = 60
LOGARITHMIC_OVER = 30.0
"""Ratio of a metric's largest to its smallest mean above which its axis and its colour are logarithmic."""
SCALE = [[0.0, "#eef3f9"], [0.5, "#5b9bd5"], [1.0, "#173f6b"]]


def lines(grid: Grid, metric: Metric) -> go.Figure | None:
    """Draws one panel per combination of the facets: lines with bands over numbers, bars over names."""
    x = grid.x
    if x is None:
        return None
    panels = grid.panels[:MAX_PANELS]
    drawing, where = _panels(grid.axes, panels, shared_y=True)
    factor, _ = unit_of(metric)
    floor = _floor(grid, metric)
    for i, panel in enumerate(panels):
        for j, value in enumerate(grid.colour.values if grid.colour else (None,)):
            chosen = {**panel, **({grid.colour.key: value} if grid.colour else {})}
            name = grid.colour.label(value) if grid.colour else ""
            style = line_style(j)
            known = [(v, grid.at({**chosen, x.key: v}, metric)) for v in x.values]
            along = [
                (v, interval if floor is None else interval._replace(low=_at_least(interval.low, floor)))
                for v, interval in known
                if not math.isnan(interval.mean)
            ]
            for trace in _traces(x, along, name, style, factor, legend=i == 0 and grid.colour is not None):
                drawing.add_trace(trace, **where[i])
    if x.is_numeric:
        drawing.update_xaxes(type="log" if x.is_logarithmic else "linear", tickvals=_ticks(x))
    else:
        drawing.update_xaxes(
            type="category", categoryorder="array", categoryarray=[x.label(v) for v in x.values]
        )
    drawing.update_xaxes(title=x.key)
    drawing.update_yaxes(**({"rangemode": "tozero"} if floor is None else log_axis(_means(grid, metric))))
    drawing.update_yaxes(title=titled(metric), col=1)
    return _laid_out(drawing, len(panels), legend_title=grid.colour.key if grid.colour else "")


def heat_map(grid: Grid, metric: Metric) -> go.Figure | None:
    """Draws means over the seeds, x against y, one panel per combination of other axes; None for one axis."""
    x, y = grid.x, grid.y
    if x is None or y is None or x == y:
        return None
    others = [axis for axis in grid.axes if axis not in (x, y)]
    panels = _combinations(others)[:MAX_PANELS]
    drawing, where = _panels(grid.axes, panels, shared_y=True)
    factor, _ = unit_of(metric)
    is_log = _floor(grid, metric) is not None
    labelled = len(x.values) * len(y.values) <= MAX_LABELLED_CELLS
    for i, panel in enumerate(panels):
        values = [
            [factor * grid.at({**panel, x.key: a, y.key: b}, metric).mean for a in x.values] for b in y.values
        ]
        cells = [[None if math.isnan(value) else value for value in row] for row in values]
        cell = go.Heatmap(
            x=[x.label(v) for v in x.values],
            y=[y.label(v) for v in y.values],
            z=[[math.log10(v) if is_log and v is not None else v for v in row] for row in cells],
            text=[
                ["" if v is None else f"{v:,.3g}" if v < 1000 else f"{v:,.0f}" for v in row] for row in cells
            ],
            coloraxis="coloraxis",
            xgap=1,
            ygap=1,
            texttemplate="%{text}" if labelled else None,
            hovertemplate=f"{x.key}=%{{x}}, {y.key}=%{{y}}: %{{text}}<extra></extra>",
        )
        drawing.add_trace(cell, **where[i])
    drawing.update_xaxes(title=x.key, type="category")
    drawing.update_yaxes(type="category")
    drawing.update_yaxes(title=y.key, col=1)
    _laid_out(drawing, len(panels))
    drawing.update_xaxes(showgrid=False)
    drawing.update_yaxes(showgrid=False)
    bar = {"title": titled(metric), **(_log_ticks(grid, metric) if is_log else {})}
    drawing.update_layout(coloraxis={"colorscale": SCALE, "colorbar": bar})
    return drawing


def parallel(grid: Grid) -> go.Figure | None:
    """Draws one line per configuration through its settings and figures, coloured by the first figure."""
    if len(grid.axes) < 2 or not grid.metrics or len(grid.cells) < 2:
        return None
    cells = list(grid.cells)
    dimensions = [_dimension(axis, [cell[i] for cell in cells]) for i, axis in enumerate(grid.axes)]
    for metric in grid.metrics:
        factor, _ = unit_of(metric)
        values = [factor * grid.cells[cell][metric.key].mean for cell in cells]
        finite = [value for value in values if math.isfinite(value)]
        if finite:  # a line needs a value on every axis: a missing one is drawn at the bottom
            filled = [value if math.isfinite(value) else min(finite) for value in values]
            dimensions.append({"label": titled(metric), "values": filled, "tickformat": ",.4~g"})
    first = dimensions[len(grid.axes)] if len(dimensions) > len(grid.axes) else dimensions[0]
    drawing = go.Figure(
        go.Parcoords(
            dimensions=dimensions,
            line={"color": first["values"], "colorscale": "Viridis", "showscale": False},
            labelfont={"size": 11},
            labelangle=-12,
            labelside="top",
        )
    )
    return styled(drawing, height_px=460, margin={"l": 90, "r": 70, "t": 110, "b": 30})


def pareto_front(grid: Grid) -> go.Figure | None:
    """Draws output tokens/s per GPU against those of a user, one point per configuration, and their front."""
    of_user, of_gpu = PARETO
    known = {
        cell: (of_cell[of_user.key].mean, of_cell[of_gpu.key].mean)
        for cell, of_cell in grid.cells.items()
        if of_user.key in of_cell and of_gpu.key in of_cell
    }
    points = {cell: point for cell, point in known.items() if all(map(math.isfinite, point))}
    if len(points) < 2:
        return None
    drawing = go.Figure()
    place = None if grid.colour is None else grid.axes.index(grid.colour)
    groups = [None] if grid.colour is None else list(grid.colour.values)
    for j, value in enumerate(groups):
        own = [cell for cell in points if place is None or cell[place] == value]
        names = [
            html.escape(
                panel_title(grid.axes, dict(zip((axis.key for axis in grid.axes), cell, strict=True)))
            )
            for cell in own
        ]
        drawing.add_trace(
            go.Scatter(
                x=[points[cell][0] for cell in own],
                y=[points[cell][1] for cell in own],
                mode="markers",
                marker={"color": line_style(j)["color"], "size": 10},
                name="" if grid.colour is None else grid.colour.label(value),
                showlegend=grid.colour is not None,
                text=names,
                hovertemplate="%{text}<br>%{x:.3g} tokens/s per user, %{y:,.4g} per GPU<extra></extra>",
            )
        )
    drawing.add_trace(front_line(list(points.values())))
    drawing.update_xaxes(title=of_user.label, rangemode="tozero")
    drawing.update_yaxes(title=of_gpu.label, rangemode="tozero")
    return styled(drawing, height_px=PANEL_PX + 170)


def _means(grid: Grid, metric: Metric) -> list[float]:
    """Returns the means of all cells in the unit of the drawing."""
    factor, _ = unit_of(metric)
    means = (factor * cell[metric.key].mean for cell in grid.cells.values())
    return [mean for mean in means if math.isfinite(mean)]


def _floor(grid: Grid, metric: Metric) -> float | None:
    """Returns the lower end of the metric's logarithmic axis, in its own unit; None: the axis is linear."""
    means = _means(grid, metric)
    if not means or min(means) <= 0 or max(means) / min(means) <= LOGARITHMIC_OVER:
        return None
    return min(means) / unit_of(metric)[0] / 2


def _at_least(low: float, floor: float) -> float:
    """Limits a band to what a logarithmic axis can show; NaN stays."""
    return low if math.isnan(low) else max(low, floor)


def _log_ticks(grid: Grid, metric: Metric) -> dict[str, Any]:
    """Returns the tick labels 1, 3, 10, ... of a colour bar of logarithms."""
    means = _means(grid, metric)
    decades = range(math.floor(math.log10(min(means))), math.ceil(math.log10(max(means))) + 1)
    values = [step * 10.0**decade for decade in decades for step in (1, 3)]
    shown_values = [value for value in values if min(means) <= value <= max(means)]
    return {
        "tickvals": [math.log10(value) for value in shown_values],
        "ticktext": [f"{value:,.12g}" for value in shown_values],
    }


def _traces(
    x: GridAxis,
    along: Sequence[tuple[Any, Interval]],
    name: str,
    style: Mapping[str, Any],
    factor: float,
    *,
    legend: bool,
) -> list[go.Scatter]:
    values, intervals = [value for value, _ in along], [interval for _, interval in along]
    if x.is_numeric:
        return line_with_band(values, intervals, name, style, factor=factor, legend=legend)
    half = [0.0 if math.isnan(i.low) else factor * (i.high - i.mean) for i in intervals]
    return [
        go.Scatter(
            x=[x.label(value) for value in values],
            y=[factor * i.mean for i in intervals],
            error_y={"type": "data", "array": half, "color": style["color"]},
            mode="markers",
            marker={"color": style["color"], "size": 9},
            name=name,
            legendgroup=name,
            showlegend=legend,
        )
    ]


def _dimension(axis: GridAxis, values: Sequence[Any]) -> dict[str, Any]:
    """Returns an axis of parallel coordinates with equal distances between its values."""
    place = {value: i for i, value in enumerate(axis.values)}
    return {
        "label": axis.key,
        "values": [place[value] for value in values],
        "tickvals": list(place.values()),
        "ticktext": [axis.label(value) for value in axis.values],
    }


def _combinations(axes: Sequence[GridAxis]) -> list[dict[str, Any]]:
    keys = [axis.key for axis in axes]
    return [
        dict(zip(keys, values, strict=True)) for values in itertools.product(*(axis.values for axis in axes))
    ]


def _panels(
    axes: Sequence[GridAxis], panels: Sequence[Mapping[str, Any]], *, shared_y: bool
) -> tuple[go.Figure, list[dict[str, int]]]:
    columns = _columns(len(panels))
    rows = math.ceil(len(panels) / columns)
    drawing = make_subplots(
        rows,
        columns,
        subplot_titles=[panel_title(axes, panel) for panel in panels],
        shared_yaxes="all" if shared_y else False,
        vertical_spacing=0.35 / rows if rows > 1 else 0.0,
        horizontal_spacing=0.05,
    )
    return drawing, [{"row": i // columns + 1, "col": i % columns + 1} for i in range(len(panels))]


def _laid_out(drawing: go.Figure, num_panels: int, legend_title: str = "") -> go.Figure:
    rows = math.ceil(num_panels / _columns(num_panels))
    height_px = PANEL_PX * rows + 110
    legend = {"orientation": "h", "y": 1 + 34 / (height_px - 110), "yanchor": "bottom", "x": 0}
    drawing.update_yaxes(automargin=True)
    return styled(
        drawing,
        height_px=height_px,
        legend={**legend, "title": {"text": f"{legend_title}  "}},
        margin={"l": 70, "r": 20, "t": 76 if legend_title else 36, "b": 54},
    )


def _columns(num_panels: int) -> int:
    return 2 if num_panels == 4 else min(COLUMNS, num_panels)


def _ticks(x: GridAxis) -> list[Any] | None:
    return list(x.values) if len(x.values) <= 12 else None
