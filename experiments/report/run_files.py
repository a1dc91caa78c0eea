"""Reads the files in the folder of a run, which may be missing, damaged or cut short."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sim.settings.errors import ConfigError
from sim.settings.json_files import read_json_object

STREAMED_AGAIN = (
    "the run has streamed its tables; simulate it again with output.tables=true, or with "
    "output.tables=stream_all for its iterations and gaps"
)
TABLES_AGAIN = "simulate it again with output.tables=true (in a sweep: sweep.tables=true)"


def check_run_folder(folder: Path, needed: Sequence[str]) -> None:
    """Raises ConfigError unless the folder holds one run with these files."""
    if not folder.is_dir():
        raise ConfigError(f"run={folder}: no such folder; give the folder that windtunnel simulate printed")
    if (folder / "sweep.json").exists():
        raise ConfigError(f"run={folder}: is the folder of a sweep; give sweep={folder} to windtunnel report")
    missing = [name for name in needed if not (folder / name).exists()]
    if not missing:
        return
    inner = sorted({file.parent for name in needed for file in folder.glob(f"*/{name}")})
    if inner and "summary.json" in missing:
        raise ConfigError(f"run={folder}: contains several runs; choose one, such as run={inner[0]}")
    if len(missing) == len(needed):
        raise ConfigError(f"run={folder}: contains no run; give the folder that windtunnel simulate printed")
    again = STREAMED_AGAIN if (folder / "requests.parquet").is_dir() else TABLES_AGAIN
    raise ConfigError(f"run={folder}: contains no {', '.join(missing)}; {again}")


def read_summary(folder: Path) -> dict[str, Any]:
    """Reads summary.json of a simulated run. Raises ConfigError."""
    summary = read_json_object(folder / "summary.json", f"run={folder}")
    if not {"trimmed", "goodput", "throughput", "simulated_s"} <= summary.keys():
        raise ConfigError(f"run={folder}: its summary.json is not that of a simulated run")
    return summary


def read_table(folder: Path, name: str, filters: list[tuple[str, str, Any]] | None = None) -> pd.DataFrame:
    """Reads a table of a run. Raises ConfigError for a file that is not a whole parquet file."""
    file = folder / name
    try:
        return pd.read_parquet(file, filters=filters)
    except (OSError, ValueError, KeyError) as error:
        what = "is empty" if file.is_file() and not file.stat().st_size else "is damaged or cut short"
        raise ConfigError(f"run={folder}: {name} {what}; {TABLES_AGAIN}") from error
