"""Plots of predicted against measured times of operators."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from experiments.study.errors import relative_errors
from sim.report.chart import BLUE, GREY, LIMIT, ORANGE, log_axis, styled

MAX_POINTS = 2000
"""Largest number of points of each colour in a plot."""


def residual_figure(lines: pd.DataFrame, size_label: str, seed: int = 0) -> go.Figure:
    """Draws predicted against measured times (left) and errors against size (right).

    The error plot also shows medians by factors of 4 in size. lines: from
    `experiments.calibrate.fit.residuals`; rows without a prediction are not drawn.
    """
    predicted = lines[lines["predicted_s"].notna()]
    error = pd.Series(relative_errors(predicted["predicted_s"], predicted["measured_s"]), predicted.index)
    figure = make_subplots(1, 2, subplot_titles=["predicted against measured, us", "error, %"])
    for name, colour, part in (
        ("fitted", BLUE, predicted[~predicted["validation"]]),
        ("validation", ORANGE, predicted[predicted["validation"]]),
    ):
        shown = part.sample(min(len(part), MAX_POINTS), random_state=seed)
        marker = {"color": colour, "size": 3, "opacity": 0.4}
        common = {"mode": "markers", "marker": marker, "name": name, "legendgroup": name}
        figure.add_scatter(
            x=1e6 * shown["measured_s"], y=1e6 * shown["predicted_s"], text=shown["data_type"], **common
        )
        figure.add_scatter(
            x=shown["size"],
            y=error[shown.index],
            text=shown["data_type"],
            showlegend=False,
            row=1,
            col=2,
            **common,
        )
    limits = 1e6 * predicted["measured_s"].agg(["min", "max"]).to_numpy()
    equal = {"mode": "lines", "line": LIMIT, "showlegend": False, "hoverinfo": "skip"}
    figure.add_scatter(x=limits, y=limits, row=1, col=1, **equal)
    steps = np.floor(np.log2(predicted["size"].to_numpy(dtype=np.float64)) / 2)
    medians = error.groupby(steps).median()
    figure.add_scatter(
        x=2.0 ** (2 * medians.index.to_numpy() + 1),
        y=medians,
        mode="lines",
        line={"color": GREY, "width": 2},
        name="median error",
        row=1,
        col=2,
    )
    figure.update_xaxes(**log_axis(limits), title="measured, us", row=1, col=1)
    figure.update_xaxes(**log_axis(predicted["size"]), title=size_label, row=1, col=2)
    figure.update_yaxes(**log_axis(1e6 * predicted["predicted_s"]), title="predicted, us", row=1, col=1)
    figure.update_yaxes(range=[-100, 150], row=1, col=2)
    return styled(figure, height_px=420)
