"""The rows of the league: published runs to which no tool was fitted, as far as is known.

They are rows of part=test of `data/public_rows.csv`, some of each cell: a source, a model and a GPU. That
table is in the project, so anybody can make the predictions again.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import pandas as pd

from experiments.score import public
from experiments.score.league.asked import FIGURES
from experiments.score.table import read_table

PATH = Path(public.__file__).with_name("data") / "public_rows.csv"
COLUMNS = ("id", *FIGURES, "cpu_s", "estimated", "status")
"""Columns of a file of kept predictions."""
CELL = ["source", "model", "gpu"]
ROWS_OF_CELL = 2
"""Number of rows of each cell, so that a source with many rows of one model on one GPU does not decide."""


def league_rows() -> pd.DataFrame:
    """Returns the measured rows, with the compared quantities and `arch`. Raises ConfigError."""
    table = public.checked(read_table(PATH, public.COLUMNS, public.POSITIVE), PATH)
    return sampled(table[table["part"] == "test"], ROWS_OF_CELL)


def sampled(table: pd.DataFrame, most: int) -> pd.DataFrame:
    """Returns up to so many rows of each cell, the same ones every time, in the order of the table."""
    order = table["id"].map(lambda row: zlib.crc32(str(row).encode())).sort_values()
    chosen = table.loc[order.index].groupby(CELL, sort=False).head(most)
    return table[table.index.isin(chosen.index)]
