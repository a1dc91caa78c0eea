"""Page gallery.html: a figure, a table, settings and sources of every family."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from experiments.reproduce.rows import Row
from experiments.reproduce.table import count_line, notes, source_text
from experiments.reproduce.verdicts import Judged, State, Verdict
from experiments.study.verdicts import LEVEL
from sim.report.chart import GREEN, GREY, ORANGE, RED, log_axis, styled
from sim.report.plain_page import drawn, table, write_page

COLOURS = {State.HOLDS: GREEN, State.DIFFERS: ORANGE, State.FELL_OUT: RED, State.MISSING: GREY}
ROW_PX = 26
OPEN_END = 2.0
"""Length of the bar of a published bound without an upper end, as a factor."""


def write_gallery(path: Path, judged: Sequence[Judged], seeds: Sequence[int]) -> None:
    """Writes the page, which opens offline."""
    simulated = f"those of runs with every seed have a {LEVEL} over {len(seeds)} seeds"
    if len(seeds) == 1:
        simulated = "those of runs with every seed have one seed, and none either"
    introduction = (
        f"{count_line(judged)} A row holds if our figure is at most 5 % outside of the published one (2 % "
        "for plain arithmetic), or in the band that the row states. Only simulated rows are evidence for the "
        "simulator: a change of it by a tenth breaks each of them that holds. None breaks indicative ones, "
        "computed ones are formulas, and fitted ones have a constant or a setting that was chosen by the "
        f"published figure. Figures of one run have no interval; {simulated}. Figures whose source was not "
        "read here are marked. In the drawings, bars are the published values and dots ours, relative to the "
        "middle of what was published."
    )
    write_page(
        path, "Published figures beside ours", introduction, {p.family.title: _section(p) for p in judged}
    )


def _section(part: Judged) -> str:
    rows = [["claim", "kind", "published", "ours", "ratio", ""]]
    for verdict in part.verdicts:
        row = verdict.row
        claim = f"{row.claim} [{row.name}]"
        cells = [claim, row.kind.value, row.published_text, verdict.ours_text, verdict.ratio_text]
        rows.append([*cells, verdict.state.value])
    items = "".join(f"<li>{_note(verdict.row)}</li>" for verdict in part.verdicts)
    return f"{drawn(figure(part.verdicts))}{table(rows)}<ul>{items}</ul>"


def _note(row: Row) -> str:
    """Returns the setting of a row, its source with a link, and the sentence on a difference, as HTML."""
    source = html.escape(source_text(row.source))
    if row.source.url:
        source = f'<a href="{html.escape(row.source.url)}" rel="noreferrer">{source}</a>'
    said = html.escape(" ".join(notes(row)))
    return f"{row.name}: {html.escape(row.setting)}. From: {source}. {said}".rstrip()


def figure(verdicts: Sequence[Verdict]) -> go.Figure:
    """Draws ours relative to the published figure, on a logarithmic axis, one line per row."""
    drawing = go.Figure()
    names = [verdict.row.name for verdict in verdicts]
    shown = []
    for verdict in verdicts:
        low, high, middle = _ends(verdict)
        ours, label = verdict.ours, f"{verdict.row.name}: {verdict.ours_text}"
        shown += [low / middle, high / middle]
        drawing.add_trace(
            go.Scatter(
                x=[low / middle, high / middle],
                y=[verdict.row.name] * 2,
                mode="lines+markers",
                line={"color": "#c3c9d3", "width": 8},
                marker={"size": 8, "color": "#c3c9d3"},
                hoverinfo="skip",
            )
        )
        if math.isnan(ours.mean) or ours.mean <= 0:
            continue
        shown.append(ours.mean / middle)
        width = {}
        if not math.isnan(ours.low):
            width = {
                "error_x": {
                    "type": "data",
                    "array": [(ours.high - ours.mean) / middle],
                    "arrayminus": [(ours.mean - max(ours.low, 1e-3 * ours.mean)) / middle],
                }
            }
        drawing.add_trace(
            go.Scatter(
                x=[ours.mean / middle],
                y=[verdict.row.name],
                mode="markers",
                marker={"size": 9, "color": COLOURS[verdict.state]},
                hovertemplate=f"{html.escape(label)}<extra></extra>",
                **width,
            )
        )
    drawing.update_xaxes(title="relative to the published figure", **log_axis([*shown, 0.5, 2.0]))
    drawing.update_yaxes(categoryorder="array", categoryarray=names[::-1], automargin=True)
    return styled(drawing, height_px=ROW_PX * len(verdicts) + 110, showlegend=False)


def _ends(verdict: Verdict) -> tuple[float, float, float]:
    """Returns the ends of the bar of the published values, and their geometric middle."""
    low, high = verdict.row.published
    if math.isinf(high):
        return low, OPEN_END * low, low
    if low == 0:
        return high / OPEN_END, high, high
    return low, high, math.sqrt(low * high)
