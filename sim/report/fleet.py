"""How many replicas there were, and what they were doing."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go

from sim.metrics import fleet
from sim.records.run import RunRecords
from sim.report.look import BLUE, GREEN, GREY, ORANGE, RED, styled, time_unit

COLOURS = (GREY, ORANGE, GREEN, BLUE, RED)
"""By state: wanted, starting, serving, draining, down."""


def replicas_over_time(records: RunRecords) -> go.Figure | None:
    """A step line a state; None where all replicas served all the time."""
    times_s, counts = fleet.replicas_over_time(records)
    if (counts["serving"][:-1] == len(records.replicas)).all():
        return None
    divisor, unit = time_unit(records.end_s)
    figure = go.Figure()
    for (name, count), colour in zip(counts.items(), COLOURS, strict=True):
        if count.any():
            line = {"color": colour, "shape": "hv", "dash": "dot" if name == "wanted" else "solid"}
            x = np.append(times_s, records.end_s) / divisor
            figure.add_trace(
                go.Scatter(x=x, y=np.append(count, count[-1]), name=name, mode="lines", line=line)
            )
    figure.update_xaxes(title=f"simulated {unit}", range=[0, records.end_s / divisor])
    figure.update_yaxes(title="replicas", rangemode="tozero")
    return styled(figure, height_px=320)
