"""kind=requests: runs with every request's timestamps; columns as in vllm_requests/requests.csv.gz.

The arrivals are replayed open loop with the output lengths that were forced. What the table does not say of a
run (GPU, model, engine limits) stands in runs.csv beside it. With prefix_block_ids, a number for each full
block of the prompt, equal where prefixes are, the engine caches prefixes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from experiments.study.measured_requests import scenario_of
from experiments.study.measured_rows import simulated
from hwmodels.levels.rooflines import LatencyLevel
from sim.settings.errors import ConfigError

COLUMNS = ("id", "run", "arrival_s", "input_tokens", "output_tokens")
METRICS = ("ttft_mean_ms", "tpot_mean_ms", "e2e_mean_ms")
POSITIVE = ("input_tokens", "output_tokens", "ttft_ms", "tpot_ms", "e2e_ms")


def by_run(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """One row a run: its settings from runs.csv, its requests as arrays, and the means that were measured."""
    settings_path = path.parent / "runs.csv"
    try:
        settings = pd.read_csv(settings_path).set_index("run")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"measured={path}: its runs' settings, {settings_path}, cannot be read: {error}"
        ) from error
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
        rows.append({"id": run, "run": run, **row, **measured, "requests": requests})
    return pd.DataFrame(rows)


def predict(row: dict[str, Any], latency: LatencyLevel) -> dict[str, float]:
    """`METRICS`, over all requests of the run. Raises NotSimulatedError or ValueError."""
    scenario = scenario_of(row, latency)
    _, table = simulated(scenario)
    return {f"{name}_mean_ms": 1e3 * float(table[f"{name}_s"].mean()) for name in ("ttft", "tpot", "e2e")}
