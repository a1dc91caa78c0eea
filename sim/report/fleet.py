"""Plots the number of replicas by state over time."""

from __future__ import annotations

import numpy as np

from sim.metrics import fleet
from sim.records.run import RunRecords
from sim.report.chart import BLUE, GREEN, GREY, ORANGE, RED, Chart, time_unit

COLOURS = (GREY, ORANGE, GREEN, BLUE, RED)
"""Colours of the states: wanted, starting, serving, draining, down."""


def replicas_over_time(records: RunRecords) -> Chart | None:
    """Plots one step line per state; returns None if all replicas served all the time."""
    times_s, counts = fleet.replicas_over_time(records)
    if (counts["serving"][:-1] == len(records.replicas)).all():
        return None
    divisor, unit = time_unit(records.end_s)
    chart = Chart()
    for (name, count), colour in zip(counts.items(), COLOURS, strict=True):
        if count.any():
            line = {"color": colour, "shape": "hv", "dash": "dot" if name == "wanted" else "solid"}
            x = np.append(times_s, records.end_s) / divisor
            chart.add("scatter", x=x, y=np.append(count, count[-1]), name=name, mode="lines", line=line)
    chart.x_axes(title=f"simulated {unit}", range=[0, records.end_s / divisor])
    chart.y_axes(title="replicas", rangemode="tozero")
    return chart.styled(height_px=320)
