"""The plots of the report: SLO attainment, latencies, the run over time, its iterations, speculation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics import fleet
from sim.metrics.definitions import Times, Window
from sim.metrics.features import acceptance_by_pool
from sim.metrics.figure import KINDS, rented_s
from sim.metrics.plots import ALL, MAX_REPLICAS_APART, OVER_TIME, Plots
from sim.metrics.series import cdf_points
from sim.metrics.slo import Slo
from sim.records.run import RunRecords
from sim.records.table import Table
from sim.report import numbers
from sim.report.chart import (
    BLUE,
    COMPONENT_COLOURS,
    GREEN,
    GREY,
    KIND_COLOURS,
    LIMIT,
    ORANGE,
    PURPLE,
    RED,
    SERIES,
    Chart,
    log_axis,
    panels,
    time_unit,
)
from sim.report.numbers import number

NUM_TIME_BUCKETS = 60
TERM_COLOURS = {"ttft": ORANGE, "tpot": PURPLE, "e2e": GREEN, "publish": RED, "task": GREY}


def slo_attainment(plots: Plots, goodput: Mapping[str, Any], window: Window, slo: Slo) -> Chart:
    """Plots three panels: attainment by limit, by arrival time and by prompt length (in octaves).

    goodput: the summary's section. At least one request must have been measured.
    """
    figures = plots.figures
    whole = {ALL: goodput["share"]} | {term.upper(): one for term, one in goodput["term_shares"].items()}
    names = {ALL: ALL} | {term.upper(): term for term in slo.limits_s}
    middle_s, counts = figures.by_time.buckets(["requests", *names.values()], window.end_s, NUM_TIME_BUCKETS)
    some = np.flatnonzero(counts["requests"])
    octaves = dict(sorted(figures.octaves.items()))
    lengths, arrivals = np.array(list(octaves)), np.array([one.num for one in octaves.values()])
    colours = dict(zip(whole, [BLUE, *(TERM_COLOURS[term] for term in slo.limits_s)], strict=True))
    titles = ("all requests", "by arrival time", "by prompt length")
    chart = panels(titles, num_columns=3, share_y=True, column_widths=[0.2, 0.45, 0.35])

    chart.add(
        "bar",
        x=list(whole),
        y=[100 * share for share in whole.values()],
        marker={"color": list(colours.values())},
        text=[numbers.percent_at_least(share) for share in whole.values()],
        textposition="auto",
        textangle=0,
        insidetextanchor="middle",
        showlegend=False,
    )

    divisor, unit = time_unit(window.end_s)
    for name, key in names.items():
        by_time = counts[key][some] / counts["requests"][some]
        by_length = np.array([octave.met.get(key, 0) for octave in octaves.values()]) / arrivals
        style: dict[str, Any] = {"line": {"color": colours[name], "width": 2.5 if name == ALL else 1.2}}
        style |= {"mode": "lines+markers", "marker": {"size": 4}, "legendgroup": name, "name": name}
        chart.add("scatter", 1, x=middle_s[some] / divisor, y=100 * by_time, **style)
        style |= {"showlegend": False, "customdata": arrivals}
        style |= {"hovertemplate": "%{y:.1f} % of %{customdata:,} requests"}
        chart.add("scatter", 2, x=lengths * 2**0.5, y=100 * by_length, **style)
    chart.horizontal_line(100 * slo.attainment_target, LIMIT)
    chart.x_axes(1, title=unit)
    chart.x_axes(2, title="prompt tokens", **log_axis(lengths, max_labels=6))
    chart.y_axes(range=[0, 102])
    chart.y_axes(0, title="% of requests")
    return chart.styled(height_px=400, legend={"orientation": "h", "y": -0.25, "yanchor": "top", "x": 0})


MARKED = (50, 99)
"""Percentiles that are marked on distributions."""
NOTHING = np.array([])


def latency_cdfs(plots: Plots, slo: Slo | None) -> Chart:
    """Plots the cumulative share of requests (ITL: of gaps between tokens) for each of the four latencies.

    p50 and p99 are marked on each curve.
    """
    limits_ms = {name: limit_s * 1e3 for name, limit_s in slo.limits_s.items()} if slo else {}
    titles = [
        f"{name.upper()}, limit {limits_ms[name]:g} ms" if name in limits_ms else name.upper()
        for name in plots.latencies
    ]
    chart = panels(titles, num_columns=2, vertical_spacing=0.2)
    for panel, (name, latency) in enumerate(plots.latencies.items()):
        values_s, share = cdf_points(*latency.points())
        shown_ms = values_s * 1e3
        chart.add(
            "scatter",
            panel,
            x=shown_ms,
            y=share * 100,
            name=name.upper(),
            mode="lines" if len(values_s) > 1 else "markers",
            line={"color": BLUE, "width": 2, "shape": "hv"},
            hovertemplate="%{y:.2f} % within %{x:,.4g} ms<extra></extra>",
        )
        if name in limits_ms:
            chart.vertical_line(limits_ms[name], LIMIT, panel)
            shown_ms = np.append(shown_ms, limits_ms[name])
        chart.x_axes(panel, **log_axis(shown_ms), title="ms")
        _mark(chart, panel, 1e3 * latency.percentiles(MARKED) if latency.count else NOTHING, shown_ms)
    chart.y_axes(title="% of requests", range=[0, 101])
    chart.y_axes(2, title="% of gaps")
    return chart.styled(height_px=600, showlegend=False)


def _mark(chart: Chart, panel: int, marked_ms: Times, shown_ms: Times) -> None:
    """Marks percentiles on a curve, and writes them next to it if there is room."""
    if not len(marked_ms):
        return
    marker = {"color": BLUE, "size": 7, "line": {"color": "white", "width": 1}}
    hover = "p%{y}: %{x:,.4g} ms<extra></extra>"
    chart.add("scatter", panel, x=marked_ms, y=MARKED, mode="markers", marker=marker, hovertemplate=hover)
    positive = shown_ms[shown_ms > 0]
    for q, value_ms in zip(MARKED, marked_ms, strict=True):
        if not value_ms > 0:  # a logarithmic axis cannot show it
            continue
        place = math.log(value_ms / positive.min()) / max(math.log(positive.max() / positive.min()), 1e-9)
        anchor = (
            "left" if place < (0.65 if q > 90 else 0.5) else "center" if q > 90 and place < 0.88 else "right"
        )
        chart.note(
            math.log10(value_ms),
            q,
            f"p{q} {number(float(value_ms))} ms",
            panel,
            xanchor=anchor,
            yanchor="top" if q > 90 else "middle",
            xshift={"left": 8, "center": 0, "right": -8}[anchor],
            yshift=-6 if q > 90 else 0,
            bgcolor="rgba(255,255,255,0.75)",
            font={"size": 11},
        )


def ttft_by_prompt_length(plots: Plots, slo: Slo | None) -> Chart:
    """Plots one point per request, and the median and p99 for each octave of prompt lengths.

    If there are many requests, only a part is drawn, always including the slowest.
    """
    lengths, ttft_s = plots.figures.requests.drawn()
    ttft_ms = 1e3 * ttft_s
    begun = {lower: one.ttft for lower, one in sorted(plots.figures.octaves.items()) if one.ttft.count}
    lower, heights = np.array(list(begun)), [1e3 * ttft.percentiles(MARKED) for ttft in begun.values()]
    chart = Chart()
    marker = {"color": BLUE, "size": 4, "opacity": 0.35}
    chart.add("scatter", x=lengths, y=ttft_ms, mode="markers", marker=marker, name="request")
    for place, (label, colour) in enumerate((("median", ORANGE), ("p99", RED))):
        # The middle of an octave, on a logarithmic axis, is sqrt(2) times its lower end.
        line = {"color": colour, "width": 2}
        y = [float(both[place]) for both in heights]
        chart.add("scatter", x=lower * 2**0.5, y=y, mode="lines+markers", line=line, name=label)
    if slo and "ttft" in slo.limits_s:
        limit_ms = slo.limits_s["ttft"] * 1e3
        chart.horizontal_line(limit_ms, LIMIT)
        ttft_ms = np.append(ttft_ms, limit_ms)
    chart.update_traces(hovertemplate="%{x:,.0f} prompt tokens, %{y:,.4g} ms")
    chart.x_axes(**log_axis(lengths, max_labels=16), title="prompt tokens")
    chart.y_axes(**log_axis(ttft_ms), title="TTFT, ms")
    return chart.styled(height_px=420)


STATES = ("requests running", "requests waiting", "KV blocks in use, %", "tokens in the batch")
"""Titles of the panels of states, in the order of `PlotFigures.states`."""
RATES = {
    "output tokens/s": {"output tokens": ("tokens", BLUE)},
    "input tokens/s": {"input tokens": ("input_tokens", PURPLE)},
    "requests/s": {"arrivals": ("arrivals", ORANGE), "finished": ("finished", GREEN)},
}
"""Panels of rates by title: the lines by name, each with its events of `PlotFigures.whole_run` and colour.
Output has its own panel because input rates are much higher.
"""
Curves = dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]]
"""Mean and maximum of a state by replica, in each bin."""


def timeline(plots: Plots, end: RunRecords, window: Window) -> Chart | None:
    """Plots seven panels over one time axis; returns None for a run of 0 s. Trimmed time is shaded."""
    end_s = end.end_s
    if not end_s > 0:
        return None
    divisor, unit = time_unit(end_s)
    titles = [*STATES, *(f"{title}, all replicas" for title in RATES)]
    chart = panels(titles, share_x=True, vertical_spacing=0.03)
    width_s = plots.figures.states.width_s
    starts_s = np.arange(plots.figures.states.num_bins, dtype=np.float64) * width_s
    for panel, curves in enumerate(_curves(plots, end, starts_s)):
        middle = (starts_s + width_s / 2) / divisor
        for trace in _state_traces(curves, middle, show_legend=panel == 0):
            chart.add("scatter", panel, **trace)
    rates = plots.figures.whole_run
    num_bins = max(int(end_s / rates.width_s), 0)  # those that end before the run
    middle_s = (np.arange(num_bins, dtype=np.float64) + 0.5) * rates.width_s
    for panel, lines in enumerate(RATES.values(), start=len(STATES)):
        for name, (key, colour) in lines.items():
            line = {"color": colour, "width": 1.5}
            per_s = rates.of(key, num_bins) / rates.width_s
            chart.add("scatter", panel, **_line(middle_s / divisor, per_s, name, line))
    for start_s, stop_s in ((0.0, window.start_s), (window.end_s, end_s)):
        if stop_s > start_s:
            shade = {"fillcolor": "#2d3748", "opacity": 0.08, "line": {"width": 0}}
            chart.vertical_band(start_s / divisor, stop_s / divisor, **shade)
    chart.x_axes(len(titles) - 1, title=f"simulated {unit}")
    chart.x_axes(range=[0, end_s / divisor])
    chart.y_axes(rangemode="tozero")
    return chart.styled(
        height_px=1230,
        legend={"orientation": "h", "y": -0.055, "yanchor": "top", "x": 0},
        hovermode="x unified",
    )


def _curves(plots: Plots, end: RunRecords, starts_s: NDArray[np.float64]) -> Iterator[Curves]:
    """Yields the curves of each state: per replica, or of all replicas if there are many."""
    states, num_replicas = plots.figures.states, end.num_replicas
    # The last interval is shorter if the run ends in it.
    width_s = np.clip(end.end_s - starts_s, 1e-9, states.width_s)
    for integral, highest in zip(states.integrals, states.maxima, strict=True):
        mean = integral / width_s
        if num_replicas > MAX_REPLICAS_APART:
            yield {"all replicas": (mean.sum(axis=0) / num_replicas, highest.max(axis=0))}
        else:
            names = [f"replica {i}" for i in range(num_replicas)] if num_replicas > 1 else [""]
            yield {name: (mean[i], highest[i]) for i, name in enumerate(names)}


def _state_traces(curves: Curves, middle: NDArray[np.float64], *, show_legend: bool) -> list[dict[str, Any]]:
    traces = []
    for (name, (mean, highest)), colour in zip(curves.items(), SERIES, strict=False):
        for label, height, line in (
            ("maximum", highest, {"color": colour, "width": 0.8, "dash": "dot"}),
            ("mean", mean, {"color": colour, "width": 1.8}),
        ):
            full = f"{name} {label}".strip()
            traces.append(_line(middle, height, full, line, showlegend=show_legend, legendgroup=full))
    return traces


def _line(
    x: NDArray[np.float64], y: NDArray[np.float64], name: str, line: dict[str, Any], **more: Any
) -> dict[str, Any]:
    # Seven digits are enough for a screen and halve the file.
    points = {"x": x.astype(np.float32), "y": y.astype(np.float32)}
    return {**points, "name": name, "mode": "lines", "line": line, **more}


STATE_COLOURS = (GREY, ORANGE, GREEN, BLUE, RED)
"""Colours of the states: wanted, starting, serving, draining, down."""


def replicas_over_time(records: RunRecords) -> Chart | None:
    """Plots one step line per state; returns None if all replicas served all the time."""
    times_s, counts = fleet.replicas_over_time(records)
    if (counts["serving"][:-1] == len(records.replicas)).all():
        return None
    divisor, unit = time_unit(records.end_s)
    chart = Chart()
    for (name, count), colour in zip(counts.items(), STATE_COLOURS, strict=True):
        if count.any():
            line = {"color": colour, "shape": "hv", "dash": "dot" if name == "wanted" else "solid"}
            x = np.append(times_s, records.end_s) / divisor
            chart.add("scatter", x=x, y=np.append(count, count[-1]), name=name, mode="lines", line=line)
    chart.x_axes(title=f"simulated {unit}", range=[0, records.end_s / divisor])
    chart.y_axes(title="replicas", rangemode="tozero")
    return chart.styled(height_px=320)


def time_by_kind(plots: Plots, end: RunRecords, window: Window) -> Chart:
    """Plots stacked bars: shares of the replicas' time by kind of iteration and component, and idle time."""
    seconds, busy_s = plots.figures.times.seconds(), plots.figures.times.busy_s
    replica_s = float(rented_s(end, window).sum())
    replica_s = max(replica_s, 1e-12)
    components = dict.fromkeys(component for parts in seconds.values() for component in parts)
    rows = ["idle", *reversed(KINDS)]
    chart = Chart()
    for component, colour in zip(components, COMPONENT_COLOURS, strict=False):
        share = [100 * seconds.get(kind, {}).get(component, 0.0) / replica_s for kind in rows]
        chart.add("bar", y=rows, x=share, name=component, orientation="h", marker={"color": colour})
    idle_s = max(replica_s - busy_s, 0.0)
    idle = [100 * idle_s / replica_s, *(0.0 for _ in KINDS)]
    chart.add("bar", y=rows, x=idle, name="idle", orientation="h", marker={"color": "#dde2ea"})
    chart.update_traces(hovertemplate="%{y}, %{fullData.name}: %{x:.2f} % of the time<extra></extra>")
    chart.x_axes(title="% of the replicas' time")
    return chart.styled(height_px=330, legend={"traceorder": "normal"}, barmode="stack")


def iteration_times(plots: Plots) -> Chart:
    """Plots one point per iteration: its duration against the tokens in its batch.

    If there are many iterations, only a part is drawn, always including the longest.
    """
    points = [(x, 1e3 * y) for x, y in (kind.drawn() for kind in plots.figures.iterations.kinds)]
    tokens, duration_ms = (np.concatenate([pair[place] for pair in points]) for place in range(2))
    chart = Chart()
    for name, (x, y) in zip(KINDS, points, strict=True):
        marker = {"color": KIND_COLOURS.get(name, GREY), "size": 4, "opacity": 0.45}
        chart.add("scatter", x=x, y=y, mode="markers", marker=marker, name=name)
    chart.update_traces(hovertemplate="%{x:,} tokens, %{y:.4g} ms")
    chart.x_axes(**log_axis(tokens, max_labels=16), title="tokens in the batch")
    chart.y_axes(**log_axis(duration_ms), title="iteration time, ms")
    return chart.styled(height_px=330)


NUM_BUCKETS = 100
MAX_PLACES = 16

SPECULATION_CAPTION = (
    "Left: share of the drafts in which the token at a place was accepted; dotted: given that those before "
    "were. Middle: 1 + accepted draft tokens / drafts, over short intervals. Right: tokens of a pass per "
    "decoding sequence, against the sequences in the batch. It is one without speculation, so this is the "
    "speed-up at equal iteration times; grey: the rows that the pass computed per sequence."
)


def speculation(plots: Plots, end: RunRecords, window: Window) -> Chart | None:
    """Plots three panels; None unless draft tokens were verified.

    end: records with the acceptance by place.
    """
    drafts = plots.figures.drafts
    if drafts is None or not drafts.has_passes or end.speculation is None:
        return None
    middle_s, counts = drafts.by_time.buckets(OVER_TIME, window.end_s, NUM_BUCKETS)
    accepted, passes = (counts[name] for name in OVER_TIME)
    titles = ("acceptance by place", "mean accepted length", "tokens per pass")
    chart = panels(titles, num_columns=3)
    _add_places(chart, end)
    _add_lengths(chart, middle_s, accepted, passes, window)
    _add_batches(chart, drafts.by_batch())
    chart.y_axes(rangemode="tozero")
    chart.y_axes(0, title="% of drafts", range=[0, 101])
    chart.y_axes(1, title="tokens")
    chart.y_axes(2, title="tokens per sequence")
    return chart.styled(height_px=360, legend={"orientation": "h", "y": -0.25, "yanchor": "top", "x": 0})


def _add_places(chart: Chart, records: RunRecords) -> None:
    """Adds the bars of each pool that speculates, and the conditional rates as lines."""
    assert records.speculation is not None
    places = acceptance_by_pool(records.speculation.acceptance)
    places = places[places["place"] <= MAX_PLACES]
    pools = np.unique(places["pool"]).tolist()
    several = len(pools) > 1
    for pool, colour in zip(pools, SERIES, strict=False):
        own = places[places["pool"] == pool]
        name = f"{records.pools[pool].name}: " if several else ""
        x = own["place"]
        chart.add(
            "bar",
            x=x,
            y=100 * own["rate"],
            name=f"{name}accepted",
            marker={"color": colour},
            customdata=own["drafted"],
            hovertemplate="place %{x}: %{y:.1f} % of %{customdata:,} drafts",
        )
        chart.add(
            "scatter",
            x=x,
            y=100 * own["conditional_rate"],
            name=f"{name}accepted if those before were",
            mode="lines+markers",
            line={"color": ORANGE if not several else colour, "width": 1.5, "dash": "dot"},
            hovertemplate="place %{x}: %{y:.1f} %",
        )
    chart.x_axes(0, title="place of the draft token", dtick=1)


def _add_lengths(
    chart: Chart,
    middle_s: NDArray[np.float64],
    accepted: NDArray[Any],
    passes: NDArray[Any],
    window: Window,
) -> None:
    """Adds the mean accepted length over time."""
    drafted = passes > 0
    divisor, unit = time_unit(window.end_s)
    middle = middle_s / divisor
    length = 1 + accepted[drafted] / passes[drafted]
    line = {"color": BLUE, "width": 1.8}
    chart.add("scatter", 1, x=middle[drafted], y=length, mode="lines", line=line, showlegend=False)
    chart.x_axes(1, title=f"simulated {unit}")


def _add_batches(chart: Chart, sums: Table) -> None:
    """Adds the mean tokens and rows of a pass by the number of its sequences."""
    seqs = sums["seqs"]
    for kind, name, colour in (("kept_tokens", "tokens", BLUE), ("verified_tokens", "rows computed", GREY)):
        per_seq = 1 + sums[kind] / sums["decode_seqs"]
        marker = {"color": colour, "size": 5}
        chart.add("scatter", 2, x=seqs, y=per_seq, mode="lines+markers", marker=marker, name=name)
    chart.x_axes(2, title="decoding sequences", **log_axis(seqs, max_labels=6))
