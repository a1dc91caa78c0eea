"""Page capacity.html: the answer, tokens/s per user against tokens/s per GPU, costs, and the tables."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import plotly.graph_objects as go

from experiments.capacity.answer import Answer
from experiments.capacity.results import Ranked, derived, excluded, exclusion_lines
from experiments.capacity.search import State
from experiments.capacity.tables import (
    caveats,
    launches,
    sentences,
    stage_rows,
    turned,
)
from experiments.study.pages import COLOURS, settings_text
from experiments.study.pareto import front_line
from experiments.study.study import Page
from experiments.study.verdicts import LEVEL
from hwmodels.iterations.ops import decode_shape, largest_batch
from sim.metrics.confidence import Interval, mean_interval
from sim.report.chart import GREY, SERIES, styled
from sim.report.numbers import seconds
from sim.report.plain_page import Content, folded, listed, table

LEGEND = (
    f"±: half the width of the {LEVEL} over the seeds. Good requests are those that meet the SLO. High "
    "utilisation with low MFU is normal for decode, which reads all weights to compute one token per "
    "sequence: memory bandwidth (MBU) limits it."
)
HEIGHT_PX = 480
PARETO = (
    "Each point is a fleet that meets the SLO; further right is faster for each user, further up serves more "
    "with each GPU. No fleet is better in both than one on the Pareto front (rings, dotted line). Thin lines "
    "show how far decodes alone could go on the ranked candidates (roofline), from one sequence to a full KV "
    "cache."
)
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")


def page_of(found: Answer, config: Mapping[str, Any]) -> Page:
    """Returns the page. config: of the command."""
    seeds = f"{len(found.seeds)} seeds" if len(found.seeds) > 1 else "one seed"
    sections: dict[str, Content] = {"Answer": listed([*sentences(found), *caveats(found)])}
    if found.ranked:
        sections["Cheapest"] = f"<p>{LEGEND}</p>{table(turned(found.ranked))}"
        sections["Pareto front: speed per user against throughput per GPU"] = [
            f"<p>{PARETO}</p>",
            pareto_figure(found),
        ]
        sections["Cost"] = [cost_figure(found)]
    if len(found.stages) > 1:
        sections["Forecast"] = table(stage_rows(found))
    for title, (command, notes) in launches(found).items():
        sections[title] = f"<pre>{html.escape(command)}</pre>{listed(notes)}"
    out = excluded(found.question, found.search)
    lines = [f"{one.name}: {one.reason}. {one.detail}" for one in out]
    every = folded("All of them", "\n".join(lines)) if lines else ""
    sections["Excluded candidates"] = listed(exclusion_lines(out) or ["None."]) + every
    sections["Assumptions and notes"] = listed(
        found.notes or ["None, because no run was simulated to its end."]
    )
    sections["Configuration"] = settings_text("Settings of the search", config)
    return Page(
        "Capacity",
        f"The lowest cost that meets the SLO for {found.requests:,} requests in "
        f"{seconds(found.lasts_s)}, with {seeds}. All candidates serve the same requests.",
        sections,
    )


def pareto_figure(found: Answer) -> go.Figure:
    """Draws output tokens/s per user (1 / median TPOT) against output tokens/s per GPU.

    It shows the simulated candidates, the Pareto front, and the decode roofline of each ranked candidate.
    """
    drawing = go.Figure()
    states = [state for state in found.search.ranked() if state.candidate.name in found.points]
    by_gpu: dict[str, list[State]] = {}
    for state in states:
        by_gpu.setdefault(state.candidate.scenario.hardware.name, []).append(state)
    for i, (gpu, own) in enumerate(by_gpu.items()):
        users, gpus = zip(*(_point(found, state) for state in own), strict=True)
        drawing.add_trace(
            go.Scatter(
                x=[each.mean for each in users],
                y=[each.mean for each in gpus],
                error_x=_bars(users),
                error_y=_bars(gpus),
                mode="markers",
                name=gpu,
                marker={"color": COLOURS[i % len(COLOURS)], "symbol": SYMBOLS[i % len(SYMBOLS)], "size": 10},
                text=[html.escape(_label(found, state)) for state in own],
                hovertemplate="%{text}<br>%{x:.3g} tokens/s per user, %{y:,.4g} per GPU<extra></extra>",
            )
        )
    for i, row in enumerate(found.ranked):
        drawing.add_trace(_ceiling(found, row, COLOURS[i % len(COLOURS)]))
    points = [(user.mean, gpu.mean) for user, gpu in (_point(found, state) for state in states)]
    rings = {"symbol": "circle-open", "size": 18, "line": {"width": 2}}
    drawing.add_trace(front_line(points, "lines+markers", marker=rings))
    drawing.update_xaxes(title="output tokens/s per user (1 / median TPOT)", rangemode="tozero")
    drawing.update_yaxes(title="output tokens/s per GPU", rangemode="tozero")
    return styled(drawing, height_px=HEIGHT_PX)


def _ceiling(found: Answer, row: Ranked, colour: str) -> go.Scatter:
    """Draws a candidate's decode-only roofline, from one sequence to as many as fit."""
    scenario = row.candidate.scenario
    context = max(1, round(found.points[row.candidate.name][0].batch[1]))
    most = largest_batch(scenario.plan_memory(), context, scenario.engine.max_num_seqs).num_seqs
    counts = np.unique(np.geomspace(1, max(most, 1), 40).astype(np.int64))
    model = scenario.iteration_model()
    steps_s = np.array([float(model.seconds(decode_shape(int(n), context))) for n in counts])
    return go.Scatter(
        x=1 / steps_s,
        y=counts / steps_s / row.candidate.num_devices,
        mode="lines",
        line={"color": colour, "width": 1},
        opacity=0.6,
        name=f"{row.candidate.name}, decode only (roofline)",
        text=[f"{n} sequence{'s' * bool(n != 1)} of {context:,} tokens" for n in counts],
        hovertemplate=(
            f"{html.escape(row.candidate.name)}, %{{text}}<br>"
            "%{x:.3g} tokens/s per user, %{y:,.4g} per GPU<extra></extra>"
        ),
    )


def cost_figure(found: Answer) -> go.Figure:
    """Draws USD per hour of the candidates that meet the SLO, and lower bounds of undecided candidates."""
    drawing = go.Figure()
    search = found.search
    states = search.ranked()
    drawing.add_trace(
        go.Bar(
            y=[state.candidate.name for state in states],
            x=[search.least_cost(state) for state in states],
            orientation="h",
            name="meets the SLO",
            marker={"color": SERIES[0]},
            hovertemplate="%{y}: $%{x:,.2f}/hour<extra></extra>",
        )
    )
    left = [s for s in search.states if not s.is_settled]
    left = sorted(left, key=search.least_cost)[:20]
    drawing.add_trace(
        go.Bar(
            y=[state.candidate.name for state in left],
            x=[search.least_cost(state) for state in left],
            orientation="h",
            name="lower bound of the cost, not simulated further",
            marker={"color": GREY},
            opacity=0.4,
            hovertemplate="%{y}: at least $%{x:,.2f}/hour<extra></extra>",
        )
    )
    drawing.update_xaxes(title="$/hour", rangemode="tozero")
    drawing.update_yaxes(autorange="reversed")
    return styled(drawing, height_px=140 + 24 * (len(states) + len(left)), margin={"l": 220})


def _point(found: Answer, state: State) -> tuple[Interval, Interval]:
    """Computes output tokens/s per user and per GPU, with intervals over the seeds."""
    num_devices = found.search.replicas(state) * state.candidate.num_devices
    columns = derived(found.points[state.candidate.name], found.search.least_cost(state), num_devices)
    return mean_interval(columns["tokens_per_s_and_user"]), mean_interval(columns["tokens_per_s_and_gpu"])


def _label(found: Answer, state: State) -> str:
    search = found.search
    return f"{search.replicas(state)} x {state.candidate.name}, ${search.least_cost(state):,.2f}/hour"


def _bars(intervals: tuple[Interval, ...]) -> dict[str, Any]:
    halves = [(each.high - each.low) / 2 for each in intervals]
    return {"type": "data", "array": [0.0 if math.isnan(half) else half for half in halves], "thickness": 1}
