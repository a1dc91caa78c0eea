"""kind=requests: runs with the timestamps of every request; columns as in vllm_requests/requests.csv.gz.

The arrivals are replayed open loop with the measured output lengths. The GPU, model and settings of each run
are in runs.csv beside the table (`experiments.study.vllm_runs`). If the table has prefix_block_ids (a number
per full block of the prompt, equal for equal prefixes), prompts share prefixes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.score.engine_versions import engine_of
from experiments.study.measured_requests import scenario_of
from experiments.study.measured_rows import simulated
from experiments.study.vllm_runs import unused
from hwmodels.levels import LatencyLevel
from hwmodels.levels.table_files import read_table_file
from sim.settings.errors import ConfigError

COLUMNS = ("id", "run", "arrival_s", "input_tokens", "output_tokens")
METRICS = ("ttft_mean_ms", "tpot_mean_ms", "e2e_mean_ms")
POSITIVE = ("input_tokens", "output_tokens", "ttft_ms", "tpot_ms", "e2e_ms")


def by_run(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Returns a row per run: its settings from runs.csv, its requests as a table, and measured means."""
    settings_path = path.parent / "runs.csv"
    try:
        settings = read_table_file(settings_path).set_index("run")
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"measured={path}: the settings of its runs, {settings_path}, cannot be read: {error}"
        ) from error
    check_requests(table, path)
    twice = settings.index[settings.index.duplicated()]
    if len(twice):
        raise ConfigError(f"measured={path}: run={twice[0]}: occurs twice in {settings_path}; keep one")
    rows = []
    for run, requests in table.sort_values("arrival_s").groupby("run"):
        if run not in settings.index:
            raise ConfigError(f"measured={path}: run={run}: no such run in {settings_path}")
        measured = {
            f"{name}_mean_ms": float(requests[f"{name}_ms"].mean())
            for name in ("ttft", "tpot", "e2e")
            if f"{name}_ms" in requests
        }
        row = {str(name): value for name, value in settings.loc[run].items()}
        profile = engine_of({"backend": "vllm", "backend_version": row.get("vllm")})
        rows.append({"id": run, "run": run, **row, "engine": profile, **measured, "requests": requests})
    return pd.DataFrame(rows)


def check_requests(table: pd.DataFrame, path: Path) -> None:
    """Raises ConfigError at the first request without a run, a time of arrival or whole numbers of tokens."""
    for name in ("run", "arrival_s", "input_tokens", "output_tokens"):
        values, rule = table[name], "must be given"
        wrong = values.isna()
        if name != "run":
            numbers = pd.to_numeric(values, errors="coerce")
            is_arrival = name == "arrival_s"
            rule = "must be seconds" if is_arrival else "must be a whole number of tokens"
            wrong = ~np.isfinite(numbers) if is_arrival else numbers % 1 != 0
        if wrong.any():
            row = table[wrong].iloc[0]
            raise ConfigError(f"measured={path}: id={row['id']}: {name}={row[name]}: {rule}")


def unused_settings(table: pd.DataFrame) -> list[str]:
    """Returns the columns of runs.csv that no prediction uses."""
    return unused(str(name) for name in table.columns if name not in METRICS)


def predict(row: dict[str, Any], latency: LatencyLevel) -> dict[str, float]:
    """Computes `METRICS` over all requests of the run. Raises NotSimulatedError or ValueError."""
    scenario = scenario_of(row, latency)
    _, table = simulated(scenario)
    return {f"{name}_mean_ms": 1e3 * float(table[f"{name}_s"].mean()) for name in ("ttft", "tpot", "e2e")}
