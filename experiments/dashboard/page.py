"""Layout of the page: verdict, controls, results; on a wide screen, the controls are on the left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import plotly.graph_objects as go
from dash import dcc, html

from experiments.dashboard.controls import Board, Control, State
from experiments.dashboard.figures import caveats, latency_figure
from experiments.dashboard.simulation_service import Answer
from sim.report import numbers, wording
from sim.report.chart import narrow_js
from sim.report.lines import fleet_lines, pressure_lines

POLL_MS = 400
"""Interval at which the page asks for new points of the curve, in ms."""

GRAPH: Any = {"displaylogo": False, "responsive": True, "modeBarButtonsToRemove": ["lasso2d", "select2d"]}

STYLE = """
:root { --ink: #1f2733; --soft: #647084; --line: #e1e5ec; --blue: #2563a8; }
* { box-sizing: border-box; }
body { margin: 0; color: var(--ink); background: #f6f7f9; font: 14px/1.45 system-ui, sans-serif; }
main { display: grid; grid-template: "title title" auto "settings verdict" auto "settings results" 1fr /
  250px minmax(0, 1fr); column-gap: 16px; max-width: 1500px; margin: auto; padding: 14px 18px; }
h1 { grid-area: title; font-size: 18px; margin: 0 0 8px; }
.head { grid-area: verdict; min-width: 0; } .results { grid-area: results; min-width: 0; }
h2 { font-size: 14px; margin: 0 0 4px; }
section, form { background: #fff; border: 1px solid var(--line); border-radius: 8px; padding: 12px 14px; }
section { margin-bottom: 12px; min-width: 0; }
form { grid-area: settings; align-self: start; position: sticky; top: 14px; margin-bottom: 12px; }
form label { display: block; color: var(--soft); font-size: 12px; margin-top: 7px; }
form input { width: 100%; font: inherit; color: inherit; padding: 4px 8px; border: 1px solid #c3c9d3;
  border-radius: 4px; }
.number { display: flex; gap: 4px; } .number .dash-input { flex: 1; min-width: 0; }
.number button { flex: none; width: 34px; height: 34px; font: inherit; font-size: 17px; color: var(--blue);
  background: #f1f3f6; border: 1px solid #c3c9d3; border-radius: 4px; cursor: pointer; }
.dash-input-stepper { display: none; }
form input:focus-visible, form button:focus-visible { outline: 2px solid var(--blue); outline-offset: 1px; }
.error { background: #fdecec; border: 1px solid #c43838; color: #7d1f1f; border-radius: 8px;
  padding: 8px 12px; margin-bottom: 12px; max-height: 12em; overflow: auto;
  white-space: pre-wrap; overflow-wrap: anywhere; }
.error:empty { display: none; }
.verdict { font-size: 17px; font-weight: 600; } .attained { color: #2f8f5b; } .missed { color: #c43838; }
.caveat { color: #8a5a00; margin: 3px 0; } .soft { color: var(--soft); margin: 3px 0; }
.stale, main:has(.stale) #summary { opacity: .4; filter: grayscale(1); }
main:has(.stale) #summary::before { color: #c43838; content: "Results of the previous settings:";
  font-weight: 600; }
#busy { position: fixed; top: 8px; left: 0; right: 0; z-index: 9; text-align: center; visibility: hidden;
  pointer-events: none; }
#busy span { background: var(--ink); color: #fff; border-radius: 14px; padding: 4px 14px; }
main:has(#summary[data-dash-is-loading]) #busy { visibility: visible; transition: visibility 0s .3s; }
main:has(#summary[data-dash-is-loading]) :is(#results, #summary) { opacity: .4; filter: grayscale(1);
  transition: opacity 0s .3s, filter 0s .3s; }
.blocks { display: flex; flex-wrap: wrap; gap: 8px 22px; margin-top: 10px; }
table { border-collapse: collapse; }
td, th { padding: 1px 10px 1px 0; font-weight: 400; text-align: left; } td { text-align: right; }
th { color: var(--soft); } thead th { text-align: right; } .scroll { overflow-x: auto; }
code { display: block; background: #f1f3f6; border-radius: 4px; padding: 7px 9px; overflow-wrap: anywhere;
  user-select: all; }
@media (max-width: 760px) { main { grid-template: "title" "verdict" "settings" "results" / minmax(0, 1fr);
    padding: 8px; }
  form { position: static; display: grid; grid-template-columns: 1fr 1fr; gap: 6px 10px;
    align-items: center; }
  form label { margin-top: 0; } .blocks > div { flex: 1 1 100%; } .blocks table { width: 100%; } }
"""
"""Style sheet. Dash marks an output while its callback runs, here the summary during a simulation.

The results are greyed out only after 0.3 s, so that the page does not flicker during fast simulations.
"""

INDEX = f"""<!DOCTYPE html>
<html lang="en">
<head>{{%metas%}}<title>{{%title%}}</title>
<link rel="icon" href="data:,">{{%css%}}<style>{STYLE}</style><script>{narrow_js()}</script></head>
<body>{{%app_entry%}}<footer>{{%config%}}{{%scripts%}}{{%renderer%}}</footer></body>
</html>
"""


def layout(board: Board) -> html.Div:
    """Returns the layout of a page that was just opened, with a name of its own."""
    fields = [part for control in board.controls for part in (_label(control), _field(control))]
    return html.Div(
        [
            dcc.Location(id="url", refresh=False),
            dcc.Store(id="client", data=uuid4().hex),
            dcc.Store(id="state"),
            dcc.Store(id="problems", data=[]),
            dcc.Store(id="answered"),
            dcc.Store(id="shown"),
            dcc.Interval(id="poll", interval=POLL_MS, disabled=True),
            html.Main(
                [
                    html.H1("windtunnel"),
                    html.Div(
                        [
                            html.Div(id="error", className="error", role="alert"),
                            html.Div(html.Span("simulating ..."), id="busy", role="status"),
                            html.Section(id="summary"),
                        ],
                        className="head",
                    ),
                    html.Form(fields, title="settings"),
                    html.Div(
                        [
                            html.Div(_results(), id="results"),
                            html.Section([html.H2("Equivalent command"), html.Code(id="command")]),
                        ],
                        className="results",
                    ),
                ]
            ),
        ]
    )


def _results() -> list[html.Section]:
    return [
        html.Section(id="tables"),
        html.Section([html.H2("Latency"), _graph("latency")]),
        html.Section(
            [
                html.H2("SLO attainment and cost over the request rate"),
                _graph("curve"),
                html.Div(id="curve-note", className="soft"),
            ]
        ),
        html.Section([html.H2("Roofline"), html.P(id="limits", className="soft"), _graph("roofline")]),
    ]


def summary(answer: Answer) -> list[Any]:
    """Returns the verdict and what qualifies it."""
    figures = answer.result.summary
    attained = figures["goodput"]["attained"] if figures["goodput"] else None
    kind = "" if attained is None else " attained" if attained else " missed"
    terms = "; ".join(wording.slo_terms(figures["goodput"])) if figures["goodput"] else ""
    return [
        html.Div(wording.verdict(figures), className=f"verdict{kind}", id="verdict"),
        html.P(terms, className="soft"),
        *(html.P(text, className="caveat") for text in caveats(answer)),
    ]


def tables(answer: Answer) -> list[Any]:
    """Returns the latencies and the headline figures."""
    figures = answer.result.summary
    blocks = wording.headline(figures)
    blocks["Cost"] = {"per hour": numbers.dollars(figures["cost"]["usd_per_hour"]), **blocks["Cost"]}
    if energy := wording.energy(figures):
        blocks["Energy"] = energy
    lines = [*pressure_lines(figures), *fleet_lines(figures)]
    latencies = [["ms", *wording.STATISTICS, "count"], *wording.latency_rows(figures)]
    return [
        html.Div(html.Div(_table(latencies), className="scroll")),
        html.Div([_block(title, rows) for title, rows in blocks.items()], className="blocks"),
        *(html.P(text, className="soft") for text in lines),
        html.P(f"Simulated in {answer.seconds:.2f} s.", className="soft", id="took"),
    ]


def drawn(figure: go.Figure | None, instead: str) -> go.Figure:
    """Returns the figure, or an empty one with a text that says why there is none."""
    if figure is not None:
        return figure
    empty = go.Figure(layout={"height": 120, "xaxis": {"visible": False}, "yaxis": {"visible": False}})
    return empty.add_annotation(text=instead, showarrow=False)


def latency(answer: Answer) -> go.Figure:
    """Returns the figure of the latencies."""
    return drawn(latency_figure(answer), "No request was measured.")


def values(board: Board, state: State) -> list[Any]:
    """Returns the values of the controls, in their order."""
    return [state[control.key] for control in board.controls]


def field_id(control: Control) -> str:
    """Returns the id of a control's field, without dots, which Dash reserves."""
    return f"control-{control.key.replace('.', '-')}"


def _label(control: Control) -> html.Label:
    return html.Label(
        control.label, htmlFor=field_id(control), title=control.key, id=f"{field_id(control)}-label"
    )


def _field(control: Control) -> Any:
    if control.kind == "choice":
        options = [{"label": o.name, "value": o.name, "title": o.description} for o in control.options]
        return dcc.Dropdown(options, control.default, id=field_id(control), clearable=False)
    name = field_id(control)
    box = dcc.Input(
        id=name,
        type="number",
        value=control.default,
        min=control.minimum if control.kind == "whole" else None,
        max=control.maximum if control.kind == "whole" else None,
        step=control.step if control.kind == "whole" else "any",
        debounce=0.35,
    )
    return html.Div([_button(control, "less"), box, _button(control, "more")], className="number")


def _button(control: Control, direction: str) -> html.Button:
    """Returns a button that changes a number; Dash's own are disabled by the limits of the first value."""
    sign, verb = ("+", "Increase") if direction == "more" else ("−", "Decrease")
    return html.Button(
        sign,
        id=f"{field_id(control)}-{direction}",
        type="button",
        title=f"{verb} {control.label}",
    )


def _graph(name: str) -> dcc.Graph:
    return dcc.Graph(
        id=name,
        config=GRAPH,
        figure={"layout": {"height": 120, "xaxis": {"visible": False}, "yaxis": {"visible": False}}},
    )


def _block(title: str, rows: dict[str, str]) -> html.Div:
    cells = [html.Tr([html.Th(name), html.Td(value)]) for name, value in rows.items()]
    return html.Div([html.H2(title), html.Table(html.Tbody(cells))])


def _table(rows: Sequence[Sequence[str]]) -> html.Table:
    head = html.Thead(html.Tr([html.Th(cell) for cell in rows[0]]))
    body = [html.Tr([html.Th(row[0]), *(html.Td(cell) for cell in row[1:])]) for row in rows[1:]]
    return html.Table([head, html.Tbody(body)])
