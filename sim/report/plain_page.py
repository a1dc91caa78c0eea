"""Writes an HTML page of plots under headings, for commands that report on several runs."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import plotly.graph_objects as go

from sim.metrics.confidence import Interval
from sim.report.chart import page_js
from sim.report.files import write_whole

_PAGE = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
* { box-sizing: border-box; }
body { max-width: 1140px; margin: 24px auto; padding: 0 20px; color: #1f2733; overflow-wrap: break-word; }
body { font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; } h2 { font-size: 18px; margin-top: 36px; } ul { padding-left: 22px; }
table { border-collapse: collapse; } td, th { padding: 2px 12px; text-align: right; font-weight: 400; }
th:first-child { text-align: left; padding-left: 0; }
thead th { color: #647084; border-bottom: 1px solid #e1e5ec; vertical-align: bottom; }
table { font-variant-numeric: tabular-nums; margin-bottom: 12px; }
td { white-space: nowrap; } tbody th { min-width: 8em; }
.scroll, pre { overflow-x: auto; } pre { font-size: 13px; }
summary { cursor: pointer; }
@media (max-width: 640px) { body { padding: 0 14px; } h1 { font-size: 21px; } td, th { padding: 2px 8px; } }
</style>
<script>$plotly</script>
</head>
<body>
<h1>$title</h1>
<p>$introduction</p>
$sections
</body>
</html>
"""
)


Content = str | Sequence[str | go.Figure]
"""The content of a section: HTML, or pieces of HTML and plots in order."""


def write_page(path: Path, title: str, introduction: str, sections: Mapping[str, Content]) -> None:
    """Writes one HTML file that opens offline. sections: by their headings."""
    body = "".join(
        f"<h2>{html.escape(heading)}</h2>{_html(content)}" for heading, content in sections.items()
    )
    page = _PAGE.substitute(
        title=html.escape(title),
        introduction=html.escape(introduction),
        sections=body,
        plotly=page_js().decode(),
    )
    write_whole(path, page)


def _html(content: Content) -> str:
    pieces = [content] if isinstance(content, str) else content
    return "".join(piece if isinstance(piece, str) else drawn(piece) for piece in pieces)


def drawn(figure: go.Figure) -> str:
    """Returns the HTML of a figure, without plotly's own code."""
    config = {"displaylogo": False, "responsive": True}
    return f"<div class=scroll>{figure.to_html(full_html=False, include_plotlyjs=False, config=config)}</div>"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns the rows as an HTML table; the first row is the heading, the first column has labels."""
    head, *body = rows
    cells = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    lines = "".join(
        f"<tr><th>{html.escape(row[0])}</th>{''.join(f'<td>{html.escape(c)}</td>' for c in row[1:])}</tr>"
        for row in body
    )
    whole = f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"
    return f'<div class="scroll">{whole}</div>'


def listed(lines: Sequence[str]) -> str:
    """Returns an HTML list of the lines, escaped."""
    return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>"


def folded(title: str, text: str, state: str = "") -> str:
    """Returns HTML that shows `text` when its title is clicked. state: "open" shows it initially."""
    return f"<details {state}><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"


def line_with_band(
    x: Sequence[Any],
    intervals: Sequence[Interval],
    name: str,
    line: Mapping[str, Any],
    *,
    symbols: Sequence[str] = (),
    factor: float = 1.0,
    legend: bool = True,
) -> list[go.Scatter]:
    """Plots the line of the means and a band between the bounds, clipped at 0 for positive means.

    line: colour and dash of the line. symbols: of the markers. factor: multiplies all values.
    """
    lows = [max(i.low, 0.0) if i.mean >= 0 else i.low for i in intervals]
    known = [i for i, low in enumerate(lows) if not math.isnan(low)]
    band = go.Scatter(
        x=[*(x[i] for i in known), *(x[i] for i in reversed(known))],
        y=[*(factor * intervals[i].high for i in known), *(factor * lows[i] for i in reversed(known))],
        fill="toself",
        fillcolor=line["color"],
        opacity=0.2,
        line={"width": 0},
        mode="lines",
        legendgroup=name,
        showlegend=False,
        hoverinfo="skip",
    )
    means = go.Scatter(
        x=list(x),
        y=[factor * i.mean for i in intervals],
        mode="lines+markers",
        line={**line, "width": 2},
        marker={"symbol": list(symbols)} if symbols else None,
        name=name,
        legendgroup=name,
        showlegend=legend,
        hovertemplate=f"{html.escape(name)}, %{{x}}: %{{y:,.4g}}<extra></extra>",
    )
    return [band, means]
