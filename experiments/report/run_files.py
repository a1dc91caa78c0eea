"""Reads the files in the folder of a run, which may be missing, damaged or cut short."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from hwmodels.checks import UnreadableFileError
from hwmodels.levels.table_files import read_parquet
from sim.settings.errors import ConfigError
from sim.settings.recorded import read_json_object

STREAM_ALL = {"iterations.parquet", "gaps.parquet", "itl.parquet"}
"""Files that a run with output.tables=stream_all has, and one with output.tables=stream lacks."""
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
    again = _streamed_again(missing) if (folder / "requests.parquet").is_dir() else TABLES_AGAIN
    raise ConfigError(f"run={folder}: contains no {', '.join(missing)}; {again}")


def _streamed_again(missing: Sequence[str]) -> str:
    """Returns how a run that has streamed its tables gets the files that it lacks."""
    if "plots.bin" in missing:
        settings = "output.report=true"
    elif STREAM_ALL.issuperset(missing):
        settings = "output.tables=stream_all, or output.tables=true"
    else:
        settings = "output.tables=true, which keeps all tables in memory"
    return f"the run has streamed its tables; simulate it again with {settings}"


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
        return read_parquet(file, filters=filters)
    except UnreadableFileError as error:
        raise ConfigError(f"run={folder}: {name}: {error}") from None
    except (OSError, ValueError, KeyError) as error:
        what = "is empty" if file.is_file() and not file.stat().st_size else "is damaged or cut short"
        raise ConfigError(f"run={folder}: {name} {what}; {TABLES_AGAIN}") from error
