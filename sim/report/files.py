"""Writes files: tables as Parquet, and summaries as JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from sim.records.table import AnyTable, Table, to_pandas
from sim.report.whole_file import write_whole


def summary_json(summary: Mapping[str, Any]) -> str:
    """Returns the text of summary.json."""
    return f"{json.dumps(summary, indent=2)}\n"


def remove_folder_of_table(path: Path) -> None:
    """Removes a table that is a folder of files: see `sim.report.chunk_tables`.

    Raises OSError if other files are in it.
    """
    if path.is_dir():
        for file in path.glob("part-*.parquet"):
            file.unlink()
        path.rmdir()


def table_bytes(table: AnyTable) -> bytes:
    """Returns the table in the parquet format."""
    if isinstance(table, Table):
        from sim.records.parquet import parquet_bytes  # noqa: PLC0415 (pyarrow takes a tenth of a second)

        return parquet_bytes(table, "zstd")
    content = BytesIO()
    to_pandas(table).to_parquet(content, index=False, compression="zstd")
    return content.getvalue()


def write_table(table: AnyTable, file: Path) -> None:
    """Writes the table to a parquet file."""
    write_whole(file, table_bytes(table))


def config_digest(config: Mapping[str, Any]) -> str:
    """Returns the digest of a resolved configuration, which does not depend on the order of its keys."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
