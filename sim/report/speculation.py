"""Plots speculative decoding: acceptance by place, accepted length over time, speed-up against batch size."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from sim.metrics.definitions import Window
from sim.metrics.features import acceptance_by_pool
from sim.metrics.plots import OVER_TIME, Plots
from sim.records.run import RunRecords
from sim.records.table import Table
from sim.report.chart import BLUE, GREY, ORANGE, SERIES, Chart, log_axis, panels, time_unit

NUM_BUCKETS = 100
MAX_PLACES = 16

CAPTION = (
    "Left: share of the drafts in which the token at a place was accepted; dotted: given that those before "
    "were. Middle: 1 + accepted draft tokens / drafts, over short intervals. Right: tokens of a pass per "
    "decoding sequence, against the sequences in the batch. It is one without speculation, so this is the "
    "speed-up at equal iteration times; grey: the rows that the pass computed per sequence."
)


def speculation(plots: Plots, end: RunRecords, window: Window) -> Chart | None:
    """Plots three panels; None unless draft tokens were verified. end: has the acceptance by place."""
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
