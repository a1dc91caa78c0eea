"""The kept predictions: a file per tool in `data/league/`, and the table of the tools.

`tools.csv` has a line per tool: its version and day of the run, how it was installed, how its predictions
are made again, the settings it got, and, if it was not run, the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from experiments.score.league.rows import COLUMNS, PATH
from experiments.score.table import read_table
from sim.settings.errors import ConfigError

FOLDER = PATH.with_name("league")
TOOLS = ("id", "version", "date", "install", "command", "settings", "not_run")


class Tool(NamedTuple):
    """A tool, and its predictions by row; None: it was not run."""

    name: str
    version: str
    date: str
    not_run: str
    predictions: pd.DataFrame | None


def kept_tools(ids: Sequence[str], folder: Path = FOLDER) -> list[Tool]:
    """Reads all tools, and the predictions of those that were run for these rows.

    Raises ConfigError for a damaged file, and for one that lacks a row of the league or has another one.
    """
    path = folder / "tools.csv"
    found = []
    for line in read_table(path, TOOLS, ()).astype(object).fillna("").to_dict("records"):
        name = line["id"]
        if bool(line["not_run"]) is bool(line["command"]):
            raise ConfigError(f"{path}: id={name}: must have a command, or else the reason in not_run")
        kept = None if line["not_run"] else predictions_of(folder / f"{name}.csv", ids)
        found.append(Tool(name, line["version"], line["date"], line["not_run"], kept))
    return found


def predictions_of(path: Path, ids: Sequence[str]) -> pd.DataFrame:
    """Reads the predictions of a tool for all rows of the league. Raises ConfigError."""
    table = read_table(path, COLUMNS, [name for name in COLUMNS if name.endswith("_ms")])
    if missing := sorted(set(ids) ^ set(table["id"])):
        raise ConfigError(
            f"{path}: id={missing[0]}: must be a row of the league, and all of them must be there"
        )
    return table
