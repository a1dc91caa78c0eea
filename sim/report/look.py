"""Colours and axes that all plots of the report share."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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

    If there were more than max_labels of them, only powers of ten have ticks. Limits that are drawn belong to
    the values.
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
