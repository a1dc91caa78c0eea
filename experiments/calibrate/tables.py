"""Reads the measured tables of one device and refuses implausible rows."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from experiments.app.settings.bounded_yaml import read_yaml
from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from experiments.calibrate.operators import OPERATORS, Bools, Operator, Rows
from experiments.study.presets import NotSimulatedError, plain, preset
from hwmodels.device import Device
from hwmodels.fitting.limits import TOO_SLOW, slowness
from hwmodels.levels.table_files import read_parquet
from sim.settings.errors import ConfigError, suggest

LEAST_SHARE = 0.5
"""A row below this share of the shortest possible time is taken to be in a wrong unit."""


class Measured(NamedTuple):
    """Rows of one table for the device."""

    rows: Rows
    """Columns as numpy arrays."""
    sound: Bools
    """False for rows faster than the data sheet allows, which are neither fitted nor predicted."""
    caveat: str
    """Description of the rows that are not sound; empty if there are none."""


def read_tables(ops: Path, device: Device, gpu: str | None = None) -> dict[str, Measured]:
    """Returns the device's rows of every table in the folder, by name of the operator.

    gpu: name of the device in the column gpu; None: any name of the device's preset.
    Raises ConfigError naming the file, row and column.
    """
    tables = tables_of(ops)
    names = {name for table in tables.values() for name in table["gpu"].unique().tolist()}
    ours = {name for name in names if (name == gpu if gpu is not None else is_called(device, name))}
    if not ours:
        asked = device.name if gpu is None else gpu
        raise ConfigError(
            f"ops={ops}: the tables have no rows of {asked}; {suggest(asked, sorted(names))}; give gpu=NAME"
        )
    chosen = {name: table[table["gpu"].isin(ours)] for name, table in tables.items()}
    return {
        name: checked(path_of(ops, name), table, OPERATORS[name], device)
        for name, table in chosen.items()
        if len(table)
    }


def tables_of(ops: Path) -> dict[str, pd.DataFrame]:
    """Reads the tables of all operators that the folder has, by name of the operator; raises ConfigError."""
    if not ops.is_dir():
        raise ConfigError(f"ops={ops}: is not a folder")
    paths = {name: path_of(ops, name) for name in OPERATORS}
    tables = {name: read(path, OPERATORS[name]) for name, path in paths.items() if path.exists()}
    if not tables:
        known = ", ".join(path.name for path in paths.values())
        raise ConfigError(f"ops={ops}: must contain at least one of the tables {known}")
    return tables


MAX_SIZE = 1e12
"""Largest size of an operator: more than any has."""


def path_of(ops: Path, operator: str) -> Path:
    """Returns the path of an operator's table."""
    return ops / f"{operator}.parquet"


def is_called(device: Device, gpu: str) -> bool:
    """Returns whether a GPU name in a table means the device: the device's own name or its preset's."""
    try:
        choice = preset("hardware", gpu)
    except NotSimulatedError:
        return plain(gpu) == plain(device.name)
    files = {found.name: found.file for found in find_groups([CONFIG_DIR])["hardware"]}
    return bool(read_yaml(files[choice]).get("name") == device.name)


def read(path: Path, operator: Operator) -> pd.DataFrame:
    """Reads the table of an operator, with defaults in optional columns; raises ConfigError."""
    try:
        table = read_parquet(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"ops: {path}: cannot be read: {error}") from error
    for name in operator.columns:
        if name not in table:
            raise ConfigError(f"ops: {path}: has no column {name}; {suggest(name, map(str, table.columns))}")
    for name, value in operator.optional.items():
        table[name] = table[name].fillna(value) if name in table else value
    return table


def checked(path: Path, table: pd.DataFrame, operator: Operator, device: Device) -> Measured:
    """Returns the table as arrays. Raises ConfigError for a wrong value and for a wrong unit of time."""
    for name in (*operator.sizes, "latency_us"):
        values = pd.to_numeric(table[name], errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)
        refuse(path, table, ~(np.isfinite(values) & (values > 0)), name, "must be a finite number > 0")
        if name != "latency_us":
            wrong = (values % 1 != 0) | (values > MAX_SIZE)
            refuse(path, table, wrong, name, f"must be a whole number from 1 to {MAX_SIZE:g}")
    rows = {name: table[name].fillna("").to_numpy(dtype=str) for name in ("id", "gpu", *operator.choices)}
    for name, allowed in operator.choices.items():
        if allowed:
            wrong = ~np.isin(rows[name], allowed)
            refuse(path, table, wrong, name, f"must be one of {', '.join(filter(None, allowed))}")
    rows |= {
        name: table[name].to_numpy(dtype=np.float64 if name == "latency_us" else np.int64)
        for name in (*operator.sizes, *operator.optional, "latency_us")
    }
    least_us = 1e6 * operator.least_seconds(rows, device)
    share = rows["latency_us"] / np.maximum(least_us, 1e-9)
    worst = int(np.argmin(share))
    found = f"id={rows['id'][worst]}: latency_us={rows['latency_us'][worst]:g}"
    reason = f"{found}, less than the {least_us[worst]:.4g} us that {device.name} needs by its data sheet"
    if share[worst] < LEAST_SHARE:
        raise ConfigError(f"ops: {path}: {reason}; is the column in us?")
    factor = slowness(1e-6 * rows["latency_us"], 1e-6 * least_us)
    if factor > TOO_SLOW:
        raise ConfigError(
            f"ops: {path}: latency_us: large rows take {factor:,.0f} times as long as {device.name} needs by "
            f"its data sheet (median; must be <= {TOO_SLOW:g}); is the column in us?"
        )
    sound = share >= 1
    num_wrong = int((~sound).sum())
    count = "1 row" if num_wrong == 1 else f"{num_wrong:,} rows"
    caveat = f"{count} faster than the data sheet allows, such as {reason}"
    return Measured(rows, sound, "" if sound.all() else caveat)


def refuse(path: Path, table: pd.DataFrame, wrong: Bools, name: str, rule: str) -> None:
    """Raises ConfigError for the first wrong row, if there is one."""
    if wrong.any():
        row = table.iloc[int(np.argmax(wrong))]
        raise ConfigError(f"ops: {path}: id={row['id']}: {name}={row[name]}: {rule}")
