"""Reads tables of measurements and rejects wrong values."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from hwmodels.levels.table_files import read_table_file
from sim.settings.errors import ConfigError, suggest

MAX_NAME, MAX_COLUMNS = 60, 200
"""Limits of the names of columns that a message lists: characters of a name, and number of names."""


def read_table(path: Path, needed: Sequence[str], positive: Sequence[str]) -> pd.DataFrame:
    """Reads a CSV (also .gz) or parquet file with these columns.

    positive: columns that, if present, must hold finite numbers > 0 or be empty. Raises ConfigError with the
    file, the row and the column, also for an id that occurs twice.
    """
    if not path.is_file():
        kind = "is a folder; name a table in it" if path.is_dir() else "no such file"
        raise ConfigError(f"measured={path}: {kind}; give a measured table in CSV or parquet")
    try:
        table = read_table_file(path)
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise ConfigError(f"measured={path}: cannot be read: {error}") from error
    for name in needed:
        if name not in table.columns:
            columns = [str(column)[:MAX_NAME] for column in table.columns[:MAX_COLUMNS]]
            raise ConfigError(f"measured={path}: column {name} is missing; {suggest(name, columns)}")
    for name in positive:
        if name in table.columns:
            check_positive(path, table, name)
    if table.empty:
        raise ConfigError(f"measured={path}: the table has no rows")
    repeated = table["id"][table["id"].duplicated()]
    if len(repeated):
        raise ConfigError(f"measured={path}: id={repeated.iloc[0]}: occurs twice; ids must be unique")
    return table


def chosen_rows(table: pd.DataFrame, where: str) -> pd.DataFrame:
    """Returns the rows that meet a condition in the syntax of pandas.DataFrame.query.

    Raises ConfigError for a wrong condition, and UndefinedVariableError for one with an unknown column.
    """
    try:
        return table.query(where)
    except pd.errors.UndefinedVariableError:
        raise
    except Exception as error:  # the expression may raise any exception
        raise ConfigError(f"where={where}: {error}") from error


def check_positive(path: Path, table: pd.DataFrame, name: str) -> None:
    """Raises ConfigError at the first value of a column that is not a finite number > 0."""
    values = pd.to_numeric(table[name], errors="coerce")
    wrong = np.flatnonzero(table[name].notna() & ~(np.isfinite(values) & (values > 0)))
    if len(wrong):
        row = table.iloc[int(wrong[0])]
        label = f"id={row['id']}" if "id" in table.columns else f"row {int(wrong[0]) + 1}"
        raise ConfigError(f"measured={path}: {label}: {name}={row[name]}: must be a finite number > 0")
