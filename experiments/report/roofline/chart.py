"""Draws the roofline chart: an HTML page that opens offline."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import plotly.graph_objects as go

from experiments.report.roofline.survey import Survey
from experiments.report.roofline.tables import explained_title, memory_lines, title
from hwmodels.iterations.ops import OperatingPoint, ridge_points
from sim.report.chart import BLUE, GREEN, GREY, ORANGE, log_axis, styled
from sim.report.numbers import number, percent
from sim.report.plain_page import drawn, write_page
from sim.report.wording import plural

PHASE_COLOURS = {"decode": BLUE, "prefill": ORANGE}


def write_chart(path: Path, found: Survey) -> None:
    """Writes the chart of a survey as an HTML page."""
    introduction = " ".join([*memory_lines(found), *found.notes])
    caption = (
        f"<p>Whole iterations against the peaks of {plural(found.settings.layout.num_devices, 'GPU')}; grey: "
        f"{explained_title(found)[0].lower()}{explained_title(found)[1:]}, of one GPU, "
        "scaled to all GPUs.</p>"
    )
    write_page(path, f"Roofline: {title(found)}", introduction, {"Chart": caption + drawn(roofline(found))})


def roofline(found: Survey) -> go.Figure:
    """Draws FLOP/s over FLOP/byte of a replica: the roof of each data type, iterations, and operators."""
    num_devices = found.settings.layout.num_devices
    figure = go.Figure()
    operators = [line for line in found.operators if line.flops and line.bytes_moved]
    intensities = [point.intensity for point in found.points]
    intensities += [line.flops / line.bytes_moved for line in operators]
    ridges = ridge_points(found.settings.hardware)
    lowest, highest = min([*intensities, 1.0]) / 2, max([*intensities, *ridges.values()]) * 2
    for dtype, ridge in ridges.items():
        own = dtype == found.compute_dtype
        line = {"color": GREEN, "width": 3} if own else {"color": GREY, "width": 1, "dash": "dot"}
        peak = num_devices * found.settings.hardware.peak_flops_per_s[dtype]
        x = np.array([lowest, ridge, highest])
        figure.add_scatter(
            x=x,
            y=np.minimum(peak, peak / ridge * x),
            mode="lines",
            name=f"{dtype}, ridge {number(ridge)}",
            line=line,
            hovertemplate=f"{dtype}: {number(peak / 1e12)} TFLOP/s, ridge {number(ridge)} FLOP/byte",
        )
    figure.add_scatter(
        x=[line.flops / line.bytes_moved for line in operators],
        y=[num_devices * line.flops / line.seconds for line in operators],
        text=[f"{line.operator}: {percent(line.share)}, {line.bound}" for line in operators],
        mode="markers",
        name="operators",
        marker={
            "color": GREY,
            "opacity": 0.6,
            "size": [6 + 24 * line.share**0.5 for line in operators],
        },
        hovertemplate="%{text}<br>%{x:.3g} FLOP/byte, %{y:.3s}FLOP/s<extra></extra>",
    )
    for phase, colour in PHASE_COLOURS.items():
        points = [point for point in found.points if point.phase == phase]
        figure.add_scatter(
            x=[point.intensity for point in points],
            y=[point.flops_per_s for point in points],
            text=[f"{point.num_seqs:,}" for point in points],
            customdata=[_hover(point) for point in points],
            mode="lines+markers+text",
            textposition="top center",
            name=f"{phase}, by batch size",
            line={"color": colour, "width": 1},
            marker={"size": 10},
            hovertemplate="%{customdata}<extra></extra>",
        )
    figure.update_xaxes(
        **log_axis([lowest, highest], max_labels=16),
        title="FLOP/byte of weights and KV (operators: of all bytes moved)",
    )
    rates = [rate for trace in figure.data for rate in trace.y]
    figure.update_yaxes(**log_axis(rates) | {"tickformat": "~s"}, title="FLOP/s")
    return styled(figure, height_px=640, legend={"orientation": "v", "x": 1.01, "y": 1, "yanchor": "top"})


def _hover(point: OperatingPoint) -> str:
    return (
        f"{point.phase}, batch {point.num_seqs:,}: {number(1e3 * point.seconds)} ms, "
        f"{number(point.tokens_per_s)} tokens/s<br>{number(point.intensity)} FLOP/byte, "
        f"MFU {percent(point.mfu)}, MBU {percent(point.mbu)}<br>"
        f"{point.bound} {100 * point.bound_share:.0f} % of the time"
    )
