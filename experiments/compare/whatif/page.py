"""Page whatif.html: verdicts, tables, a figure of all changes, limiting resources, differing settings."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from experiments.compare.results import Comparison
from experiments.compare.whatif.sentences import (
    Answers,
    caveats,
    delta_text,
    introduction,
    left_out,
    verdicts_by_change,
)
from experiments.compare.whatif.settings import BASELINE
from experiments.compare.whatif.tables import LEGEND, tables
from experiments.study.figures import label_of
from experiments.study.pages import differing_rows, last_sections, settings_text
from experiments.study.study import Page
from experiments.study.verdicts import LEVEL
from sim.metrics.confidence import Outcome
from sim.report.chart import COMPONENT_COLOURS, GREEN, GREY, RED, log_axis, styled
from sim.report.plain_page import Content, listed, table

COLOURS = {Outcome.BETTER: GREEN, Outcome.WORSE: RED}
COLUMNS = 3
PANEL_PX, ROW_PX = 90, 26
"""Height of a panel without its rows, and of each row, in pixels."""


def page_of(answers: Answers, config: Mapping[str, Any]) -> Page:
    """Returns the page. config: of the command."""
    changes = {
        arm: " ".join(words) for arm, words in answers.questions.experiment.arms.items() if arm != BASELINE
    }
    differing = table(differing_rows(answers.questions.points, max_chars=60))
    sections: dict[str, Content] = {
        "Verdicts": listed(caveats(answers)) + _verdicts(answers),
        "Compared with the baseline": "".join(map(table, tables(answers))) + f"<p>{LEGEND}</p>",
        "Figures": [
            "<p>Ratio to the baseline (shares: difference in percentage points), with its "
            f"{LEVEL}. Green: better; red: worse; grey: within noise.</p>",
            delta_figure(answers),
        ],
        "Time of the requests by resource": [limit_figure(answers)],
        "The changes": table([["change", "overrides"], *([arm, text] for arm, text in changes.items())])
        + f"<details><summary>Settings that differ</summary>{differing}</details>",
    }
    if answers.questions.left_out:
        sections["Left out"] = listed(left_out(answers))
    sections |= last_sections(answers.found.runs.notes, settings_text("Settings of the command", config))
    return Page("What if", introduction(answers), sections)


def _verdicts(answers: Answers) -> str:
    return "".join(
        f"<h3>{html.escape(arm)}</h3>{listed(lines)}" for arm, lines in verdicts_by_change(answers).items()
    )


def delta_figure(answers: Answers) -> go.Figure:
    """Draws one panel per metric and one row per change: the ratio to the baseline, with its interval.

    Metrics that are shares show the difference to the baseline, in percentage points.
    """
    metrics, arms = answers.questions.experiment.metrics, answers.changes
    num_rows = math.ceil(len(metrics) / COLUMNS)
    height = num_rows * (PANEL_PX + ROW_PX * len(arms))
    drawing = make_subplots(
        num_rows,
        COLUMNS,
        subplot_titles=[label_of(metric) for metric in metrics],
        shared_yaxes=True,
        horizontal_spacing=0.03,
        vertical_spacing=0.62 * PANEL_PX / height if num_rows > 1 else 0.0,
    )
    for i, metric in enumerate(metrics):
        where = {"row": i // COLUMNS + 1, "col": i % COLUMNS + 1}
        is_share = metric.key.endswith("share")
        ratios = [1.0]
        for arm in reversed(arms):
            dot = _dot(answers.found.of(metric, arm)[0], is_share=is_share)
            drawing.add_trace(dot, **where)
            ratios += [x for x in dot.x if x is not None]
        drawing.add_vline(x=0 if is_share else 1, line={"color": GREY, "width": 1}, **where)
        if not is_share:
            drawing.update_xaxes(**log_axis(ratios, max_labels=7), **where)
    return styled(drawing, height_px=height, showlegend=False, margin={"l": 220, "r": 20, "t": 50, "b": 40})


def _dot(comparison: Comparison, *, is_share: bool) -> go.Scatter:
    paired = comparison.paired
    interval = None if paired is None else paired.difference if is_share else paired.ratio
    if interval is None or math.isnan(interval.mean):
        return go.Scatter(x=[None], y=[comparison.arm])
    factor = 100.0 if is_share else 1.0
    mean, low, high = (factor * value for value in interval[:3])
    colour = COLOURS.get(comparison.outcome, GREY) if comparison.outcome else GREY
    known = not math.isnan(low)
    return go.Scatter(
        x=[mean],
        y=[comparison.arm],
        mode="markers",
        marker={"color": colour, "size": 9},
        error_x={"array": [high - mean], "arrayminus": [mean - low], "color": colour} if known else None,
        hovertemplate=f"{delta_text(comparison)}<extra>{comparison.arm}</extra>",
    )


def limit_figure(answers: Answers) -> go.Figure:
    """Draws one bar per arm: shares of the requests' time by the resource that they wait for or use."""
    arms = list(answers.questions.experiment.arms)
    resources = list(dict.fromkeys(name for arm in arms for name in answers.limits.get(arm, {})))
    drawing = go.Figure()
    for i, resource in enumerate(resources):
        shares = [answers.limits.get(arm, {}).get(resource) for arm in reversed(arms)]
        drawing.add_trace(
            go.Bar(
                y=list(reversed(arms)),
                x=[100 * share.mean if share else 0.0 for share in shares],
                orientation="h",
                name=resource,
                marker={"color": COMPONENT_COLOURS[i % len(COMPONENT_COLOURS)]},
                hovertemplate=f"{resource} %{{x:.1f}} %<extra>%{{y}}</extra>",
            )
        )
    drawing.update_xaxes(title="% of the requests' time", range=[0, 100])
    return styled(
        drawing,
        height_px=PANEL_PX + 20 + ROW_PX * len(arms),
        barmode="stack",
        legend_traceorder="normal",
        margin={"l": 220, "r": 20, "t": 50, "b": 48},
    )
