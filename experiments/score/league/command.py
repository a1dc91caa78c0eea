"""`windtunnel score league`: the errors of several simulators on the same measured rows, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.app.terminal import print_tables, terminal_console
from experiments.score.league.asked import FIGURES
from experiments.score.league.kept import Tool, kept_tools
from experiments.score.league.rows import league_rows
from experiments.score.report import errors_by_group
from experiments.score.table import chosen_rows
from sim.report.wording import plural
from sim.settings.errors import ConfigError

GROUPS = ("answered", "arch", "arrivals", "backend", "gpu")
ANSWERED = "by all"
TITLES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "tokens_per_s": "throughput"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LeagueJob:
    """The rows of the league and the kept predictions of all tools."""

    rows: pd.DataFrame
    tools: Sequence[Tool]

    def run(self, folder: Path) -> None:
        """Prints the tools, the errors by groups of rows, and the reasons of refusals."""
        console = terminal_console()
        run = {tool.name: answered(tool.predictions) for tool in self.tools if tool.predictions is not None}
        print_tables([tool_lines(self.rows, self.tools)], console)
        for figure, lines in error_lines(self.rows, run).items():
            text = f"{TITLES[figure]}: share of rows answered; median / p90 of the error, and bias, in %"
            console.print(text, highlight=False)
            print_tables([lines], console)
        for line in refusals(self.rows, self.tools):
            console.print(line, highlight=False, markup=False, soft_wrap=True)


def prepare_league(where: str | None) -> LeagueJob:
    """Builds the job. where: condition on the rows. Raises ConfigError."""
    rows = league_rows()
    tools = kept_tools(rows["id"].tolist())
    if where is not None:
        try:
            rows = chosen_rows(rows, where)
        except pd.errors.UndefinedVariableError as error:
            raise ConfigError(f"where={where}: {error}") from error
    if rows.empty:
        raise ConfigError(f"where={where}: no row of the league matches")
    return LeagueJob(rows=rows, tools=tools)


def answered(predictions: pd.DataFrame) -> pd.DataFrame:
    """Returns the predictions that there are, by id."""
    return predictions[predictions["status"] == "ok"].set_index("id")


def tool_lines(rows: pd.DataFrame, tools: Sequence[Tool]) -> list[list[str]]:
    """Returns a line per tool; the heading first. Seconds are the median CPU seconds of an answer."""
    lines = [["tool", "version", "run on", "asked", "answered", "estimated", "CPU s a row"]]
    for tool in tools:
        if tool.predictions is None:
            lines.append([tool.name, tool.version, "not run", "", "", "", ""])
            continue
        own = answered(tool.predictions)
        own = own[own.index.isin(rows["id"])]
        estimated, seconds = (own[name].fillna(0.0) for name in ("estimated", "cpu_s"))
        lines.append(
            [
                *(tool.name, tool.version, tool.date, f"{len(rows)}", f"{len(own)}"),
                f"{int(estimated.sum())}" if len(own) else "",
                f"{seconds.median():.2g}" if len(own) else "",
            ]
        )
    return lines


def error_lines(rows: pd.DataFrame, run: dict[str, pd.DataFrame]) -> dict[str, list[list[str]]]:
    """Returns by figure a line per group of rows with a cell per tool; the heading first.

    The group `answered by all` has the rows for which every tool that was run has this figure.
    """
    found = {}
    for figure in FIGURES:
        known = rows[rows[figure].notna()]
        if known.empty:
            continue
        by_all = np.all([known["id"].isin(own[figure].dropna().index) for own in run.values()], axis=0)
        known = known.assign(answered=pd.Series(by_all, index=known.index).map({True: ANSWERED}))
        cells: dict[tuple[str, str, int], dict[str, str]] = {}
        for name, own in run.items():
            scored = known.assign(**{f"{figure}_predicted": known["id"].map(own[figure])})
            for line in errors_by_group(scored, [figure], GROUPS)[figure].to_dict("records"):
                key = (line["by"], line["value"], line["rows"])
                cells.setdefault(key, {})[name] = cell({str(k): v for k, v in line.items()})
        found[figure] = [["group", "rows", *run]] + [
            [f"{by} {value}".strip(), f"{count}", *(own[name] for name in run)]
            for (by, value, count), own in cells.items()
        ]
    return found


def cell(line: dict[str, Any]) -> str:
    """Returns the errors of a tool on a group of rows; a dash where it answered none."""
    if not line["coverage"]:
        return "-"
    share = f"{100 * line['coverage']:.0f} %"
    return f"{share}: {_figures(line['median'])} / {_figures(line['p90'])}, {line['bias']:+.0f}"


def _figures(percent: float) -> str:
    """Returns two significant digits of a percentage, without a decimal from ten on."""
    return f"{percent:.1f}" if percent < 9.95 else f"{np.round(percent):.0f}"


def refusals(rows: pd.DataFrame, tools: Sequence[Tool]) -> list[str]:
    """Returns a sentence per tool and reason why it has no answer."""
    found = []
    for tool in tools:
        if tool.predictions is None:
            found.append(f"{tool.name}: not run: {tool.not_run}")
            continue
        own = tool.predictions[tool.predictions["id"].isin(rows["id"])]
        for reason, count in own.loc[own["status"] != "ok", "status"].value_counts().items():
            found.append(f"{tool.name}: {plural(count, 'row')} refused: {reason}")
    return found
