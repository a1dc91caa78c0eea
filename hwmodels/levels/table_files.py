"""Reads CSV and parquet files within limits, because a small compressed file may contain gigabytes."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import pandas as pd

from hwmodels.checks import UnreadableFileError, check_table

MAX_BYTES = 1 << 29
"""Largest decompressed CSV file."""
MAX_LINE = 1 << 20
"""Length in bytes from which a line is rejected."""
_PIECE = 1 << 16


def read_table_file(file: Path) -> pd.DataFrame:
    """Returns the table in a .parquet, .csv or .csv.gz file.

    Raises OSError, and ValueError for a file that is not such a table or exceeds the limits.
    """
    if not file.is_file():
        found = "must be a regular file, not a folder, pipe, socket or device"
        raise ValueError(found if file.exists() else "no such file")
    if file.suffix == ".parquet":
        return read_parquet(file)
    is_gzip = file.suffix == ".gz"
    _check_text(file, is_gzip)
    return pd.read_csv(file, compression="gzip" if is_gzip else None)


def read_parquet(file: Path, **options: Any) -> pd.DataFrame:
    """Reads a Parquet file, or a folder of them, with pandas; options: as for pandas.read_parquet.

    Raises OSError and ValueError, and UnreadableFileError if the table would take more memory than
    `check_table` allows.
    """
    parts = (
        [part for part in sorted(file.iterdir()) if part.suffix == ".parquet"] if file.is_dir() else [file]
    )
    if not parts:
        raise UnreadableFileError("is a folder without Parquet files")
    for part in parts:
        check_table(part)
    return pd.read_parquet(file, **options)


def _check_text(file: Path, is_gzip: bool) -> None:
    """Raises ValueError if the text or one of its lines is too long, or the compressed data are damaged."""
    size = line = 0
    try:
        with gzip.open(file) if is_gzip else file.open("rb") as opened:
            while piece := opened.read(_PIECE):
                first, *others = piece.split(b"\n")
                size, line = size + len(piece), line + len(first)
                if size > MAX_BYTES or line >= MAX_LINE:
                    raise ValueError(
                        f"must have at most {MAX_BYTES:,} bytes, and less than {MAX_LINE:,} in a line"
                    )
                line = len(others[-1]) if others else line
    except (EOFError, zlib.error) as error:
        raise ValueError(f"the gzip data are damaged: {error}") from error
