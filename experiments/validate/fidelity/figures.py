"""Draws simulated and real runs together: distributions, curves over time, the first iterations.

The simulated run is blue and solid, real ones are orange and dotted; repetitions share a legend entry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from experiments.validate.fidelity.curves import Curve
from experiments.validate.fidelity.measured import Measured
from experiments.validate.fidelity.metrics import LATENCIES
from sim.metrics.definitions import Counts, Times
from sim.metrics.distributions import Values
from sim.metrics.figure import KINDS, iteration_kind
from sim.metrics.series import cdf_points
from sim.report.chart import BLUE, KIND_COLOURS, ORANGE, log_axis, styled, time_unit
from sim.report.plots import MARKED

GANTT_ITERATIONS = 200
MAX_REALS = 5
"""Number of real runs that are drawn; more would hide each other."""
SIMULATED = {"color": BLUE, "width": 2}
REAL = {"color": ORANGE, "width": 2, "dash": "dot"}


def distributions(simulated: Measured, reals: Sequence[Measured]) -> go.Figure:
    """Draws CDFs of TTFT, TPOT and E2E, and of ITL if all runs have recorded it; p50 and p99 are marked."""
    reals = reals[:MAX_REALS]
    names = [
        name
        for name in LATENCIES
        if name != "itl" or all(run.gaps is not None for run in (simulated, *reals))
    ]
    columns = 2 if len(names) == 4 else 3
    titles = [LATENCIES[name] for name in names]
    figure = make_subplots(len(names) // columns, columns, subplot_titles=titles, vertical_spacing=0.2)
    shown_ms: list[list[float]] = [[] for _ in names]
    for run, label, line in _styles(simulated, reals):
        latencies = run.latencies
        for i, name in enumerate(names):
            counts = None
            if name == "itl" and run.gaps is not None:
                times_s, counts = run.gaps.gap_s, run.gaps.gap_count
            else:
                times_s = latencies[f"{name}_s"].to_numpy(dtype=np.float64)
            values_s, share = cdf_points(times_s, counts)
            trace = go.Scatter(
                x=(values_s * 1e3).astype(np.float32),
                y=(share * 100).astype(np.float32),
                name=label,
                legendgroup=label,
                showlegend=i == 0 and run in (simulated, reals[0]),
                mode="lines" if len(values_s) > 1 else "markers",
                line={**line, "shape": "hv"},
                hovertemplate=f"{label}: %{{y:.1f}} % within %{{x:,.4g}} ms<extra></extra>",
            )
            where = {"row": i // columns + 1, "col": i % columns + 1}
            figure.add_trace(trace, **where)
            figure.add_trace(_percentiles(times_s, counts, label, line), **where)
            shown_ms[i].extend(values_s * 1e3)
    for i, values_ms in enumerate(shown_ms):
        figure.update_xaxes(**log_axis(values_ms), row=i // columns + 1, col=i % columns + 1)
    figure.update_xaxes(title="ms")
    figure.update_yaxes(title="% of requests", range=[0, 101])
    if "itl" in names:
        itl = names.index("itl")
        figure.update_yaxes(title="% of gaps", row=itl // columns + 1, col=itl % columns + 1)
    return styled(
        figure,
        height_px=300 * (len(names) // columns) + 40,
        margin={"l": 64, "r": 20, "t": 70, "b": 48},
        legend={"orientation": "h", "y": 1.08, "yanchor": "bottom", "x": 0},
    )


def _percentiles(times_s: Times, counts: Counts | None, label: str, line: Mapping[str, object]) -> go.Scatter:
    """Marks the percentiles of a run on its curve; the simulated run's have names."""
    values = Values()
    values.add(times_s, counts)
    return go.Scatter(
        x=1e3 * values.percentiles(MARKED),
        y=MARKED,
        text=[f"p{q}" for q in MARKED] if label == "simulated" else None,
        textposition=["middle right", "bottom right"],
        mode="markers+text",
        marker={"color": line["color"], "size": 8, "line": {"color": "white", "width": 1}},
        name=label,
        legendgroup=label,
        showlegend=False,
        hovertemplate=f"{label}: p%{{y}} %{{x:,.4g}} ms<extra></extra>",
    )


def over_time(curves: Sequence[Curve]) -> go.Figure:
    """Draws one panel per quantity."""
    figure = make_subplots(
        len(curves),
        1,
        shared_xaxes=True,
        subplot_titles=[f"{c.title}{', %' if c.name == 'kv_use_share' else ''}" for c in curves],
        vertical_spacing=0.06,
    )
    divisor, unit = time_unit(float(curves[0].time_s[-1]))
    for row, curve in enumerate(curves, start=1):
        scale = 100 if curve.name == "kv_use_share" else 1
        drawn = [(curve.simulated, "simulated", SIMULATED)]
        drawn += [(values, "measured", REAL) for values in curve.reals[:MAX_REALS]]
        for i, (values, label, line) in enumerate(drawn):
            trace = go.Scatter(
                x=(curve.time_s / divisor).astype(np.float32),
                y=(values * scale).astype(np.float32),
                name=label,
                legendgroup=label,
                showlegend=row == 1 and i < 2,
                mode="lines",
                line=line,
            )
            figure.add_trace(trace, row, 1)
    figure.update_xaxes(title=unit, row=len(curves), col=1)
    figure.update_yaxes(rangemode="tozero")
    return styled(
        figure,
        height_px=220 * len(curves) + 80,
        hovermode="x unified",
        legend={"orientation": "h", "y": 1 + 30 / (220 * len(curves) - 40), "yanchor": "bottom", "x": 0},
        margin={"l": 64, "r": 20, "t": 70, "b": 48},
    )


def gantt(simulated: Measured, real: Measured) -> go.Figure | None:
    """Draws one replica's first iterations of both runs; None if a run has recorded no iterations."""
    rows = {"measured": _first_iterations(real), "simulated": _first_iterations(simulated)}
    if any(table is None for table in rows.values()):
        return None
    figure = go.Figure()
    for i, kind in enumerate(KINDS):
        for label, table in rows.items():
            assert table is not None
            mine = table[iteration_kind(table) == i]
            bar = go.Bar(
                x=(mine["duration_s"] * 1e3).to_numpy(dtype=np.float32),
                base=((mine["start_s"] - table["start_s"].iloc[0]) * 1e3).to_numpy(dtype=np.float64),
                y=[label] * len(mine),
                orientation="h",
                name=kind,
                legendgroup=kind,
                showlegend=label == "measured",
                marker={"color": KIND_COLOURS[kind], "line": {"color": "white", "width": 0.5}},
                customdata=_texts(mine),
                hovertemplate="%{customdata}<extra></extra>",
            )
            figure.add_trace(bar)
    figure.update_xaxes(title="ms since the first iteration")
    return styled(figure, height_px=260, barmode="overlay", margin={"l": 90, "r": 20, "t": 40, "b": 48})


def _first_iterations(run: Measured) -> pd.DataFrame | None:
    if run.iterations is None or run.iterations.empty:
        return None
    table = run.iterations
    if "replica" in table:
        table = table[table["replica"] == table["replica"].iloc[0]]
    return table.nsmallest(GANTT_ITERATIONS, "start_s").reset_index(drop=True)


def _texts(rows: pd.DataFrame) -> list[str]:
    columns = (rows[name].tolist() for name in ("decode_seqs", "prefill_tokens", "duration_s"))
    return [
        f"{decodes} decodes, {tokens} prompt tokens: {1e3 * seconds:.3g} ms"
        for decodes, tokens, seconds in zip(*columns, strict=True)
    ]


def _styles(simulated: Measured, reals: Sequence[Measured]) -> list[tuple[Measured, str, dict[str, object]]]:
    return [(simulated, "simulated", dict(SIMULATED)), *((run, "measured", dict(REAL)) for run in reals)]
