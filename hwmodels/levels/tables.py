"""Reads tables from files: detects the format by the columns, selects the rows of the simulated set-up.

The columns of a file identify its format:

    windtunnel profile  operator, component, calls, latency_us, ...: see `hwmodels.levels.profile`
    Vidur               num_tokens with attn_pre_proj_us, mlp_up_proj_us, ...; or, as Vidur writes its
                        mlp.csv, time_stats.attn_pre_proj.median, ... in milliseconds
    LLMServingSim       a folder with three files, with names that end in dense, attention and per_sequence,
                        and a fourth, moe, with experts
    a recorded run      iterations.parquet, as `windtunnel simulate` writes it

Files are .parquet, .csv or .csv.gz. If columns gpu, model and tp distinguish several set-ups, the rows of the
simulated one are selected. Only this module of the package needs pandas, which reads both formats; the others
get numpy columns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from hwmodels.levels.coverage import layers_of
from hwmodels.levels.profile import Profile, Rows
from hwmodels.levels.readers import VIDUR_OPERATORS, Layers, llmservingsim_rows, vidur_columns, vidur_rows
from hwmodels.levels.table_files import read_table_file
from hwmodels.model import ModelSpec
from hwmodels.operators.moe_routing import Routing

SUFFIXES = (".parquet", ".csv.gz", ".csv")
LAYER_TABLES = ("dense", "attention", "per_sequence")
EXPERTS_TABLE = "moe"
"""A fourth table of models with experts."""
OWN_COLUMNS = {"operator", "component", "latency_us"}
TP_COLUMNS = ("tp", "num_tensor_parallel_workers")


class Setup(NamedTuple):
    """The simulated set-up, by which the rows of a table are selected."""

    gpu: str | None
    """Name of the GPU in the table, if the user set it."""
    model: str | None
    device_name: str
    model_name: str
    tensor_parallel_size: int
    model_spec: ModelSpec
    routing: Routing

    @property
    def layers(self) -> Layers:
        """Numbers of layers by what they run."""
        return layers_of(self.model_spec, self.routing)


class Table(NamedTuple):
    """A table that was read from a file or folder."""

    source: str
    """Origin of the measurements and their GPU."""
    rows: Rows
    profile: Profile


@lru_cache(maxsize=8)
def read_table(path: Path, setup: Setup) -> Table:
    """Returns the table. Raises ValueError naming the file and its error."""
    try:
        layers = _layer_tables(path) if path.is_dir() else {}
        source, rows = _layer_rows(layers, setup) if layers else _file_rows(_profile_file(path), setup)
        return Table(source, rows, Profile.from_rows(rows))
    except ValueError as error:
        raise ValueError(f"latency.path={path}: {error}") from None


def _layer_rows(layers: Mapping[str, Path], setup: Setup) -> tuple[str, Rows]:
    if not setup.model_spec.has_experts:
        layers = {name: file for name, file in layers.items() if name != EXPERTS_TABLE}
    chosen = {name: _selected(_frame_in_folder(file), setup) for name, file in layers.items()}
    if EXPERTS_TABLE in chosen and "ep" in chosen[EXPERTS_TABLE]:
        chosen[EXPERTS_TABLE] = chosen[EXPERTS_TABLE].query("ep == 1")
    tables = {name: columns_of(frame) for name, frame in chosen.items()}
    rows = llmservingsim_rows(**tables, layers=setup.layers)
    return f"LLMServingSim's tables{_on_gpu(chosen['dense'])}", rows


def _file_rows(file: Path, setup: Setup) -> tuple[str, Rows]:
    frame = read_frame(file)
    kind = _kind(frame)
    if kind is None:
        raise ValueError(_unknown(frame))
    chosen = _selected(frame, setup)
    rows = columns_of(chosen)
    if kind == "Vidur's profile":
        rows = vidur_rows(vidur_columns(rows), layers=setup.layers)
    return f"{kind}{_on_gpu(chosen)}", rows


def _on_gpu(chosen: pd.DataFrame) -> str:
    return f" of {chosen['gpu'].iloc[0]}" if "gpu" in chosen else ""


def _profile_file(path: Path) -> Path:
    """Returns the file itself, or the one profile in a folder."""
    if not path.is_dir():
        return path
    tables = [file for file in sorted(path.iterdir()) if _stem(file) is not None]
    known = [file for file in tables if _kind(_frame_in_folder(file)) is not None]
    if len(known) != 1:
        raise ValueError(
            f"holds {len(known)} profiles; name one file, or a folder with LLMServingSim's "
            f"{', '.join(LAYER_TABLES)}"
        )
    return known[0]


def _layer_tables(folder: Path) -> dict[str, Path]:
    """Returns LLMServingSim's three files, and that of experts if there is one; {} if one is missing."""
    found = {}
    for file in sorted(folder.iterdir()):
        stem = _stem(file)
        for name in (*LAYER_TABLES, EXPERTS_TABLE):
            if stem == name or (stem or "").endswith(f"_{name}"):
                found[name] = file
    return found if {*LAYER_TABLES} <= {*found} else {}


def _stem(file: Path) -> str | None:
    """Returns the name without its suffix; None if the file is not a table."""
    for suffix in SUFFIXES:
        if file.name.endswith(suffix):
            return file.name.removesuffix(suffix)
    return None


@lru_cache(maxsize=8)
def read_frame(file: Path) -> pd.DataFrame:
    """Returns the table in a file. Raises ValueError if it is not a table."""
    if _stem(file) is None:
        raise ValueError(f"must be a table: {', '.join(SUFFIXES)}")
    try:
        return read_table_file(file)
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot be read: {error}") from error


def _frame_in_folder(file: Path) -> pd.DataFrame:
    """Calls `read_frame`; the ValueError also names the file, because the user named only the folder."""
    try:
        return read_frame(file)
    except ValueError as error:
        raise ValueError(f"{file.name}: {error}") from error


def _kind(frame: pd.DataFrame) -> str | None:
    """Returns the format of a table by its columns; None if it is unknown."""
    if set(frame) >= OWN_COLUMNS:
        return "windtunnel's profile"
    return "Vidur's profile" if set(vidur_columns(columns_of(frame))) & set(VIDUR_OPERATORS) else None


def _unknown(frame: pd.DataFrame) -> str:
    return (
        f"unknown format: columns {', '.join(map(str, frame))}; known are our own (operator, component, "
        "calls, latency_us, ...), Vidur's (num_tokens, attn_pre_proj_us, ...) and, as a folder, "
        f"LLMServingSim's {', '.join(LAYER_TABLES)}"
    )


def columns_of(frame: pd.DataFrame) -> Rows:
    """Returns the columns of a table as arrays, by name."""
    return {str(name): frame[name].to_numpy() for name in frame}


def _selected(frame: pd.DataFrame, setup: Setup) -> pd.DataFrame:
    """Returns the rows of the set-up. Raises ValueError if they are ambiguous."""
    frame = _named(frame, "gpu", setup.gpu, setup.device_name)
    frame = _named(frame, "model", setup.model, setup.model_name)
    if setup.tensor_parallel_size > 1 and not {*TP_COLUMNS} & {*frame}:
        raise ValueError(
            f"tensor_parallel_size={setup.tensor_parallel_size}: the table has no column tp, so its rows are "
            "those of a whole model; add the column, or choose latency=calibrated"
        )
    for column in TP_COLUMNS:
        if column in frame:
            sizes = sorted(frame[column].unique())
            frame = frame[frame[column] == setup.tensor_parallel_size]
            if frame.empty:
                raise ValueError(
                    f"tensor_parallel_size={setup.tensor_parallel_size}: must be one of "
                    f"{', '.join(map(str, sizes))}, which the table has"
                )
    return frame


def _named(frame: pd.DataFrame, column: str, name: str | None, simulated: str) -> pd.DataFrame:
    if column not in frame:
        return frame
    names = sorted(str(value) for value in frame[column].unique())
    if name is not None:
        if name not in names:
            raise ValueError(f"{column}={name}: must be one of {', '.join(names)}, which the table has")
        return frame[frame[column] == name]
    matches = [one for one in names if _plain(one) in _plain(simulated) or _plain(simulated) in _plain(one)]
    if len(matches) != 1:
        raise ValueError(
            f"latency.{column}=null: {simulated} must match one {column} of the table; set it to one of "
            f"{', '.join(names)}"
        )
    return frame[frame[column] == matches[0]]


def _plain(name: str) -> str:
    """Normalises names so that RTX PRO 6000 and RTXPRO6000 are equal; of a path it takes the last part."""
    return re.sub(r"[^a-z0-9]", "", name.rsplit("/", 1)[-1].lower())
