"""Finds and draws the points that no other one beats in both of two figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go

from sim.report.chart import GREY


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of the Pareto front, ordered by the first figure; larger is better in both.

    Of (1, 3), (2, 2), (1.5, 1), (3, 0), all but the third are on the front.
    """
    order = sorted(range(len(points)), key=lambda i: (-points[i][0], -points[i][1]))
    front, best = [], -math.inf
    for i in order:
        if points[i][1] > best:
            front.append(i)
            best = points[i][1]
    return front[::-1]


def front_line(points: Sequence[tuple[float, float]], mode: str = "lines", **style: Any) -> go.Scatter:
    """Draws a dotted line through the Pareto front of some points."""
    front = [points[i] for i in pareto(points)]
    return go.Scatter(
        x=[x for x, _ in front],
        y=[y for _, y in front],
        mode=mode,
        line={"dash": "dot", "color": GREY},
        name="Pareto front",
        hoverinfo="skip",
        **style,
    )
