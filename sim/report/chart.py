"""Plots of plotly.js as plain data, without plotly's Python classes, and their colours and axes.

Plotly's classes check and copy every value, which takes as long as a short run; so does their import. The
JSON here equals theirs; `Chart.figure` creates a plotly figure, for notebooks and images.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import plotly.graph_objects as go


BLUE, ORANGE, GREEN, PURPLE, RED, GREY = "#2563a8", "#d9730d", "#2f8f5b", "#7a4fb5", "#c43838", "#8a94a3"
SERIES = (BLUE, ORANGE, GREEN, PURPLE)
KIND_COLOURS = {"decode": BLUE, "mixed": PURPLE, "prefill": ORANGE}
COMPONENT_COLOURS = ("#2563a8", "#5b9bd5", "#2f8f5b", "#a9d18e", "#7a4fb5", "#d9730d", "#f2b366", "#8a94a3")

_AXIS = {
    "exponentformat": "none",
    "gridcolor": "#e8ebf0",
    "linecolor": "#c3c9d3",
    "separatethousands": True,
    "ticklen": 3,
    "ticks": "outside",
    "zeroline": False,
}
LOOK = {
    "layout": {
        "font": {"color": "#2d3748", "family": "system-ui, sans-serif", "size": 12},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "margin": {"b": 48, "l": 64, "r": 28, "t": 40},
        "modebar": {"activecolor": GREY, "bgcolor": "rgba(0,0,0,0)", "color": "#c3c9d3"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": _AXIS,
        "yaxis": _AXIS,
    }
}
"""Replaces plotly's own template, which would add 7 kB to every plot."""
LIMIT = {"color": RED, "dash": "dash", "width": 1.5}
"""Style of the line at the limit or target of an SLO."""
TITLE_FONT = {"size": 13}
"""Font of the title of a panel."""


def styled(figure: go.Figure, *, height_px: int, **layout: Any) -> go.Figure:
    """Applies the style of the report to a plot and returns it. layout: further settings of its layout."""
    figure.layout.template = LOOK  # update_layout would merge it with plotly's own template
    figure.update_layout(height=height_px, **layout)
    figure.update_annotations(font=TITLE_FONT)
    return figure


def log_axis(values: Iterable[float], *, max_labels: int = 13) -> dict[str, Any]:
    """Returns the settings of a logarithmic axis of these values, with ticks at 50, 100, 200, 500.

    With more than max_labels of them, only powers of ten have ticks. The values must include drawn limits.
    """
    positive = [value for value in map(float, values) if 0 < value < math.inf]
    decades = math.log10(max(positive) / min(positive)) * 1.1 if positive else 0.0
    # Plotly chooses 1-2-5 for 0.3 to 0.7 decades per tick, and powers of ten for more.
    by_ten = 3 * decades > max_labels
    num_ticks = math.floor(decades) if by_ten else math.ceil(decades / 0.65)
    return {"type": "log", "tickformat": ",~r", "nticks": max(num_ticks, 3 if decades < 1 else 2)}


def time_unit(duration_s: float) -> tuple[float, str]:
    """Returns the unit of the time axis for a run of duration_s: its length in seconds and its name."""
    if duration_s < 600:
        return 1.0, "seconds"
    return (60.0, "minutes") if duration_s < 6 * 3600 else (3600.0, "hours")


_TYPES = {"int8": "i1", "int16": "i2", "int32": "i4", "float32": "f4", "float64": "f8"}
"""Array types that plotly.js reads from base64 -> its names for them."""

_ESCAPED = {"<": r"\u003c", ">": r"\u003e", "/": r"\u002f"}
"""Characters escaped in a script, so that no text in it looks like the end of the script."""

_DIV = (
    '<div style="height:{height}px; width:100%;">                            <div id="{id}" '
    'class="plotly-graph-div" style="height:100%; width:100%;"></div>            <script>                '
    "window.PLOTLYENV=window.PLOTLYENV || {{}};                                "
    'if (document.getElementById("{id}")) {{                    Plotly.newPlot(                        '
    '"{id}",                        {data},                        {layout},                        '
    "{config}                    )                }};            </script>        </div>"
)


class Chart:
    """A plot: traces in one panel or in a grid of panels.

    Panels are numbered from 0, row by row from the top left. Settings are those of plotly.js.
    """

    def __init__(self) -> None:
        self.traces: list[dict[str, Any]] = []
        self.layout: dict[str, Any] = {"template": LOOK}
        self._is_grid = False
        self._num_panels = 1

    def add(self, kind: str, panel: int = 0, **settings: Any) -> None:
        """Adds a trace of a kind such as scatter or bar; settings that are None are left out."""
        trace = {**_in_order(settings), "type": kind}
        if self._is_grid:
            trace |= {"xaxis": _axis("x", panel), "yaxis": _axis("y", panel)}
        self.traces.append(trace)

    def update_traces(self, **settings: Any) -> None:
        for trace in self.traces:
            trace.update(settings)

    def x_axes(self, *panels: int, **settings: Any) -> None:
        """Changes settings of the x axes of the given panels, or of all if none is given."""
        self._update_axes("x", panels, settings)

    def y_axes(self, *panels: int, **settings: Any) -> None:
        self._update_axes("y", panels, settings)

    def vertical_line(self, x: float, line: Mapping[str, Any], panel: int = 0) -> None:
        """Draws a line through a panel from its bottom to its top."""
        ends = {"x0": x, "x1": x, "xref": _axis("x", panel), "y0": 0, "y1": 1}
        self._add_shape({"line": line, "type": "line", **ends, "yref": f"{_axis('y', panel)} domain"})

    def horizontal_line(self, y: float, line: Mapping[str, Any], *panels: int) -> None:
        """Draws a line from left to right through the given panels, or through all if none is given."""
        for panel in panels or range(self._num_panels):
            ends = {"x0": 0, "x1": 1, "xref": f"{_axis('x', panel)} domain", "y0": y, "y1": y}
            self._add_shape({"line": line, "type": "line", **ends, "yref": _axis("y", panel)})

    def vertical_band(self, x0: float, x1: float, **settings: Any) -> None:
        """Draws a band through all panels from bottom to top."""
        for panel in range(self._num_panels):
            ends = {"x0": x0, "x1": x1, "xref": _axis("x", panel), "y0": 0, "y1": 1}
            shape = {**settings, "type": "rect", **ends, "yref": f"{_axis('y', panel)} domain"}
            self._add_shape(_in_order(shape))

    def note(self, x: float, y: float, text: str, panel: int = 0, **settings: Any) -> None:
        """Writes a text at a point of a panel; on a logarithmic axis x or y is the logarithm to base 10."""
        axes = {"xref": _axis("x", panel), "yref": _axis("y", panel), "showarrow": False}
        self.layout.setdefault("annotations", []).append(
            _in_order({"x": x, "y": y, "text": text, **axes, **settings})
        )

    def styled(self, *, height_px: int, legend: Mapping[str, Any] | None = None, **layout: Any) -> Self:
        """Sets the height and further settings of the layout; returns the chart."""
        self.layout |= {} if legend is None else {"legend": legend}
        self.layout |= {"height": height_px, **layout}
        return self

    def spec(self) -> dict[str, Any]:
        """Returns the arguments of plotly.js as plain JSON."""
        return {"data": _plain(self.traces), "layout": _plain(self.layout)}

    def figure(self) -> go.Figure:
        """Returns the plot as a figure of plotly."""
        import plotly.graph_objects as go  # noqa: PLC0415 (takes 0.25 s, which a report does not need)

        return go.Figure({"data": self.traces, "layout": self.layout})

    def html(self, config: Mapping[str, Any]) -> str:
        """Returns the HTML of the plot, for a page that contains the code of `page_js`."""
        spec = self.spec()
        return _DIV.format(
            id=uuid.uuid4(),
            height=self.layout["height"],
            data=_written(spec["data"]),
            layout=_written(spec["layout"]),
            config=json.dumps(config),
        )

    def _update_axes(self, letter: str, panels: Sequence[int], settings: dict[str, Any]) -> None:
        if isinstance(settings.get("title"), str):
            settings = {**settings, "title": {"text": settings["title"]}}
        for panel in panels or range(self._num_panels):
            self.layout.setdefault(_axis(f"{letter}axis", panel), {}).update(settings)

    def _add_shape(self, shape: dict[str, Any]) -> None:
        self.layout.setdefault("shapes", []).append(shape)


def panels(
    titles: Sequence[str],
    *,
    num_columns: int = 1,
    column_widths: Sequence[float] | None = None,
    vertical_spacing: float = 0.0,
    share_x: bool = False,
    share_y: bool = False,
) -> Chart:
    """Creates an empty chart with a panel for each title.

    column_widths: in shares. vertical_spacing: between rows, as a share of the height. share_x: the panels of
    a column share one x axis with labels at the bottom; share_y: the panels of a row share one y axis with
    labels at the left.
    """
    chart = Chart()
    chart._is_grid, chart._num_panels = True, len(titles)
    domains = list(_domains(len(titles) // num_columns, num_columns, column_widths, vertical_spacing))
    for panel, (x, y) in enumerate(domains):
        chart.layout[_axis("xaxis", panel)] = {"anchor": _axis("y", panel), "domain": x}
        chart.layout[_axis("yaxis", panel)] = {"anchor": _axis("x", panel), "domain": y}
    for panel in range(len(titles)):
        bottom = len(titles) - num_columns + panel % num_columns
        left = panel - panel % num_columns
        if share_x and panel != bottom:
            chart.x_axes(panel, matches=_axis("x", bottom), showticklabels=False)
        if share_y and panel != left:
            chart.y_axes(panel, matches=_axis("y", left), showticklabels=False)
    place = {"xanchor": "center", "xref": "paper", "yanchor": "bottom", "yref": "paper"}
    chart.layout["annotations"] = [
        _in_order(
            {"font": TITLE_FONT, "showarrow": False, "text": title, "x": sum(x) / 2.0, "y": y[1], **place}
        )
        for title, (x, y) in zip(titles, domains, strict=True)
    ]
    return chart


def page_js() -> bytes:
    """Returns the code that a page with plots needs once: plotly.js, and its use on narrow screens."""
    return plotly_js() + b"\n" + narrow_js().encode()


def narrow_js() -> str:
    """Returns the code that draws the plots of plotly.js for the width of the screen."""
    return Path(__file__).with_name("narrow.js").read_text(encoding="utf-8")


def plotly_js() -> bytes:
    """Returns the code of plotly.js from the Python package plotly."""
    spec = importlib.util.find_spec("plotly")
    assert spec is not None
    assert spec.origin is not None
    return (Path(spec.origin).parent / "package_data" / "plotly.min.js").read_bytes()


def _domains(
    num_rows: int, num_columns: int, column_widths: Sequence[float] | None, vertical_spacing: float
) -> Iterator[tuple[list[float], list[float]]]:
    """Yields the x and y domain of each panel, as shares of the plot, from the top row down."""
    horizontal_spacing = 0.2 / num_columns
    room = 1.0 - horizontal_spacing * (num_columns - 1)
    shares = column_widths or [1.0] * num_columns
    widths = [room * (share / float(sum(shares))) for share in shares]
    heights = [(1.0 - vertical_spacing * (num_rows - 1)) / num_rows] * num_rows
    for row in reversed(range(num_rows)):
        bottom = sum(heights[:row]) + row * vertical_spacing
        for column, width in enumerate(widths):
            left = sum(widths[:column]) + column * horizontal_spacing
            yield [left, min(left + width, 1.0)], [bottom, min(bottom + heights[row], 1.0)]


def _axis(letter: str, panel: int) -> str:
    """Returns the name of the panel's axis in plotly.js: x, x2, x3, ..."""
    return f"{letter}{panel + 1}" if panel else letter


def _in_order(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings sorted by name, as plotly's classes do, without those that are None."""
    return {
        key: _in_order(value) if isinstance(value, Mapping) else value
        for key, value in sorted(settings.items())
        if value is not None
    }


def _plain(value: Any) -> Any:
    """Returns a value as plain JSON: None for numbers that are not finite, base64 for arrays."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return _array(value)
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _array(values: NDArray[Any]) -> Any:
    """Returns an array in base64, integers in the smallest type that holds them."""
    if not values.size:
        return []
    if values.dtype == np.int64:
        limits = (np.iinfo(kind) for kind in (np.int8, np.int16, np.int32))
        fitting = (one.dtype for one in limits if one.min <= values.min() and values.max() <= one.max)
        values = values.astype(next(fitting, values.dtype))
    name = _TYPES.get(str(values.dtype))
    if name is None or values.ndim > 1:
        return _plain(values.tolist())
    return {"dtype": name, "bdata": base64.b64encode(values.tobytes()).decode("ascii")}


def _written(spec: Any) -> str:
    text = json.dumps(spec, separators=(",", ":"))
    for character, written in _ESCAPED.items():
        text = text.replace(character, written)
    return text
