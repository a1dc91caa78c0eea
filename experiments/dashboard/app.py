"""Callbacks of the page: plain functions of the values that the browser sends, registered in Dash."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import dash
from dash import Input, Output, State, ctx, no_update
from dash.exceptions import PreventUpdate

from experiments.dashboard.controls import Board, stepped
from experiments.dashboard.figures import curve_figure, limit_sentence, roofline_figure
from experiments.dashboard.guard import guard
from experiments.dashboard.page import INDEX, drawn, field_id, latency, layout, summary, tables, values
from experiments.dashboard.simulation_service import SimulationService, Superseded
from policies.user_code import with_quote
from sim.settings.errors import ConfigError

STALE = "stale"
MAX_NAME = 64
"""Longest name of a page, in characters."""


class Callbacks:
    """Callbacks of the page; each returns one value per output in `make_app`."""

    def __init__(self, service: SimulationService) -> None:
        self.service = service
        self.board: Board = service.board

    def synchronise(self, source: Any, query: str | None, given: Sequence[Any]) -> tuple[Any, ...]:
        """Synchronises controls and address; returns (state, problems, query, one value per control).

        source: id of the component that has changed. A page that was just opened takes its state from the
        address.
        """
        board = self.board
        if source in (None, "url"):
            state, problems = board.state_of(query or "")
            shown = [
                no_update if new == old else new for new, old in zip(values(board, state), given, strict=True)
            ]
            return state, problems, no_update, *shown
        state, problems = board.parse(dict(zip([c.key for c in board.controls], given, strict=True)))
        if problems:  # the typed values stay in the controls
            return no_update, problems, no_update, *[no_update] * len(given)
        return state, [], board.query(state), *[no_update] * len(given)

    def step(self, source: Any, given: Sequence[Any]) -> list[Any]:
        """Returns one value per control of numbers, changed by the button whose id is `source`."""
        board = self.board
        values_of = dict(zip([control.key for control in board.controls], given, strict=True))
        state, _ = board.parse(values_of)
        name, _, direction = str(source).rpartition("-")
        return [
            stepped(board, state, control.key, up=direction == "more")
            if field_id(control) == name
            else no_update
            for control in board.numbers
        ]

    def answer(self, client: Any, given: Any, problems: Any) -> tuple[Any, ...]:
        """Simulates the state and returns the contents of the page.

        These are (error, class of the results, summary, tables, latency figure, request number, polling
        disabled, command line). given: the browser's state, which is parsed like an address, because any
        program may have sent it. After an error the previous results stay on the page, greyed out.
        """
        client, problems = _name(client), _lines(problems)
        state: dict[str, Any] | None = None
        if isinstance(given, Mapping):
            state, wrong = self.board.parse(given)
            problems += [line for line in wrong if line not in problems]
        message = "\n".join(problems)
        if state is None:
            return message, STALE, *[no_update] * 6
        if problems and ctx_triggered() == "problems":
            return message, STALE, *[no_update] * 6
        command = self.board.command_line(state)
        try:
            found = self.service.answer(client, state)
        except Superseded:
            raise PreventUpdate from None
        except ConfigError as error:
            errors = "\n".join([*problems, with_quote(error)])
            return errors, STALE, *[no_update] * 4, True, command
        shown = summary(found), tables(found), latency(found)
        return message, "", *shown, self._number(client), False, command

    def _number(self, client: str) -> int:
        """Returns the number of the request that was answered last."""
        curve = self.service.curve(client)
        return 0 if curve is None else curve.number

    def details(self, client: Any) -> tuple[Any, Any]:
        """Returns the roofline figure and the shares of the requests' time of the last answer."""
        curve = self.service.curve(_name(client))
        if curve is None:
            raise PreventUpdate
        answer = curve.answer
        try:
            figure = roofline_figure(answer)
        except ValueError as error:
            return drawn(None, str(error)), limit_sentence(answer)
        text = "The latency model does not show which resource limits an iteration."
        return drawn(figure, text), limit_sentence(answer)

    def grow(self, client: Any, shown: Any) -> tuple[Any, Any, Any, Any]:
        """Returns (curve figure, note, version, polling disabled), with the points simulated so far.

        shown: version of the curve that the page shows; only the page knows it, since responses can be lost.
        """
        curve = self.service.curve(_name(client))
        if curve is None:
            raise PreventUpdate
        curve.gather()
        if curve.version == shown:
            self.service.begin(curve)
            return no_update, no_update, no_update, curve.is_done
        note = curve.problem
        if not curve.is_done:
            note = "Simulating more request rates ..."
        figure = drawn(curve_figure(curve), "The workload has no request rate that could be varied.")
        return figure, note, curve.version, False


def _name(client: Any) -> str:
    """Returns the name of a page, shortened to `MAX_NAME` characters."""
    return str(client)[:MAX_NAME]


def _lines(problems: Any) -> list[str]:
    """Returns the problems that the page shows, as text."""
    return [str(line) for line in problems] if isinstance(problems, list) else []


def ctx_triggered() -> Any:
    """Returns the id of the component that triggered the callback; None outside of a request, as in tests."""
    try:
        return ctx.triggered_id
    except dash.exceptions.MissingCallbackContextException:
        return None


def make_app(service: SimulationService) -> dash.Dash:
    """Makes the Dash application; all scripts come from this server."""
    callbacks, board = Callbacks(service), service.board
    app = dash.Dash("windtunnel", title="windtunnel", update_title="", serve_locally=True)
    guard(app.server)
    app.index_string = INDEX
    app.layout = lambda: layout(board)
    fields = [field_id(control) for control in board.controls]

    @app.callback(
        Output("state", "data"),
        Output("problems", "data"),
        Output("url", "search"),
        *(Output(name, "value") for name in fields),
        Input("url", "search"),
        *(Input(name, "value") for name in fields),
    )
    def synchronise(query: str | None, *given: Any) -> Any:
        return callbacks.synchronise(ctx.triggered_id, query, given)

    numbers = [field_id(control) for control in board.numbers]

    @app.callback(
        *(Output(name, "value", allow_duplicate=True) for name in numbers),
        *(Input(f"{name}-{way}", "n_clicks") for name in numbers for way in ("less", "more")),
        *(State(name, "value") for name in fields),
        prevent_initial_call=True,
    )
    def step(*given: Any) -> Any:
        return callbacks.step(ctx.triggered_id, given[2 * len(numbers) :])

    @app.callback(
        Output("error", "children"),
        Output("results", "className"),
        Output("summary", "children"),
        Output("tables", "children"),
        Output("latency", "figure"),
        Output("answered", "data"),
        Output("poll", "disabled"),
        Output("command", "children"),
        Input("state", "data"),
        Input("problems", "data"),
        State("client", "data"),
    )
    def answer(state: Any, problems: Any, client: str) -> Any:
        return callbacks.answer(client, state, problems)

    @app.callback(
        Output("roofline", "figure"),
        Output("limits", "children"),
        Input("answered", "data"),
        State("client", "data"),
        prevent_initial_call=True,
    )
    def details(answered: Any, client: str) -> Any:
        return callbacks.details(client)

    @app.callback(
        Output("curve", "figure"),
        Output("curve-note", "children"),
        Output("shown", "data"),
        Output("poll", "disabled", allow_duplicate=True),
        Input("answered", "data"),
        Input("poll", "n_intervals"),
        State("client", "data"),
        State("shown", "data"),
        prevent_initial_call=True,
    )
    def grow(answered: Any, n_intervals: Any, client: str, shown: Any) -> Any:
        return callbacks.grow(client, shown)

    return app
