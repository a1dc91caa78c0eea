"""A page of figures under headings, for commands without a run to report on."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from string import Template

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

_PAGE = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>$title</title>
<style>
body { max-width: 1100px; margin: 24px auto; padding: 0 20px; color: #1f2733; }
body { font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; } h2 { font-size: 18px; margin-top: 36px; }
table { border-collapse: collapse; } td, th { padding: 2px 12px; text-align: right; font-weight: 400; }
th:first-child { text-align: left; } thead th { color: #647084; border-bottom: 1px solid #e1e5ec; }
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


def write_page(path: Path, title: str, introduction: str, sections: Mapping[str, str]) -> None:
    """One HTML file that opens offline. sections: HTML by heading."""
    body = "".join(f"<h2>{html.escape(heading)}</h2>{content}" for heading, content in sections.items())
    page = _PAGE.substitute(
        title=html.escape(title),
        introduction=html.escape(introduction),
        sections=body,
        plotly=get_plotlyjs(),
    )
    path.write_text(page, encoding="utf-8")


def drawn(figure: go.Figure) -> str:
    return str(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))
