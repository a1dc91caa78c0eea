"""kind=lora: published runs with and without LoRA adapters; columns as in data/lora_rows.csv.

A row is a pair of runs of equal requests, all sent at once. What is compared is the share of the speed that
the adapters leave, `with_adapters` / `without` for a throughput, and the inverse for a latency. Hosts and
base kernels cancel in it to a large part, so that it tells about the adapters' kernels alone.

    compared    tokens_per_s, duration_s, tpot_ms or e2e_ms: what `without` and `with_adapters` are, at any
                scale; duration_s: of the whole run
    baseline    none: a server without adapters; idle_slots: the same server, requests to the base model
    requests    adapters: all requests use one of `adapters`; base: all go to the base model, so that only
                the kernels of idle slots are in the share
    used        true: the row served to set a constant of the kernels, so that its error is none of a
                prediction; such rows are not in the expected errors
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.study.measured_rows import simulated, whole
from experiments.study.presets import base_scenario
from hwmodels.levels import LatencyLevel
from sim.settings.errors import ConfigError
from sim.setup.scenario import Scenario
from sim.workload.arrivals import AllAtOnce
from sim.workload.distributions import Distribution, Fixed, Lengths, Lognormal
from sim.workload.modified import WithAdapters
from sim.workload.synthetic import Synthetic

METRIC = "kept_share"
METRICS = (METRIC,)
COLUMNS = (
    "id",
    "source",
    "date",
    "address",
    "backend",
    "backend_version",
    "engine",
    "kernels",
    "model",
    "weights",
    "gpu",
    "tp_size",
    "num_requests",
    "isl",
    "isl_cv",
    "osl",
    "osl_cv",
    "max_loras",
    "max_lora_rank",
    "adapters",
    "requests",
    "baseline",
    "compared",
    "without",
    "with_adapters",
    "used",
    "assumed",
    "note",
)
ENGINE = ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_kv_blocks")
"""Columns of limits; an empty cell: the engine profile's own."""
DEVICE = {"memory_gb": ("memory_bytes", 1e9), "bandwidth_tb_s": ("memory_bandwidth_bytes_per_s", 1e12)}
"""Column of a device that differs from the preset -> its setting, and the unit."""
POSITIVE = (
    METRIC,
    *ENGINE,
    *DEVICE,
    "tp_size",
    "num_requests",
    "isl",
    "isl_cv",
    "osl",
    "osl_cv",
    "max_loras",
    "max_lora_rank",
    "adapters",
    "without",
    "with_adapters",
)
GROUPS = ("used", "backend", "kernels", "model", "source")
CHOICES = {
    "requests": ("adapters", "base"),
    "baseline": ("none", "idle_slots"),
    "compared": ("tokens_per_s", "duration_s", "tpot_ms", "e2e_ms"),
    "used": ("true", "false"),
}


def checked(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Returns the table with the measured share. Raises ConfigError with the file, the row and the column."""
    table = table.assign(used=table["used"].astype(str).str.lower())
    for name, allowed in CHOICES.items():
        wrong = table[~table[name].isin(allowed)]
        if len(wrong):
            row = wrong.iloc[0]
            raise ConfigError(
                f"measured={path}: id={row['id']}: {name}={row[name]}: must be one of {', '.join(allowed)}"
            )
    share = table["with_adapters"] / table["without"]
    return table.assign(**{METRIC: share.where(table["compared"] == "tokens_per_s", 1 / share)})


def unused(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Returns the checked rows of which no constant was set: their errors are those of predictions."""
    rows = checked(table, path)
    return rows[rows["used"] == "false"]


def scenario_of(row: dict[str, Any], latency: LatencyLevel) -> Scenario:
    """Returns the run with adapters. Raises NotSimulatedError for a name without a preset."""
    own = [f"engine.{name}={whole(row, name)}" for name in ENGINE if pd.notna(row.get(name))]
    for name, (key, unit) in DEVICE.items():
        if pd.notna(value := row.get(name)):
            own.append(f"hardware.{key}={value * unit:g}")
    if str(row.get("cuda_graphs")).lower() == "false":
        own.append("engine.cuda_graphs.enabled=false")
    if row["weights"] != "bf16":
        own.append(f"model.weights={row['weights']}")
    if "base" in row["requests"] or row["baseline"] == "idle_slots":
        own.append("engine.kernels.lora.cudagraph_specialize_lora=false")
    slots, rank = whole(row, "max_loras"), whole(row, "max_lora_rank")
    base = base_scenario(
        row["model"],
        row["gpu"],
        row["engine"],
        (
            *own,
            f"engine.kernels.lora.backend={row['kernels']}",
            f"tensor_parallel_size={whole(row, 'tp_size')}",
            "adapters=fixed_slots",
            f"adapters.max_loras={slots}",
            f"adapters.max_lora_rank={rank}",
        ),
    )
    lengths = Lengths(prompt_tokens=_length(row, "isl"), output_tokens=_length(row, "osl"))
    requests = Synthetic(arrivals=AllAtOnce(), lengths=lengths, num_requests=whole(row, "num_requests"))
    workload = WithAdapters(
        of=requests,
        num=whole(row, "adapters"),
        zipf=0.0,
        ranks=(rank,),
        base_share=float(row["requests"] == "base"),
    )
    return replace(base, latency=latency, workload=workload)


def _length(row: dict[str, Any], name: str) -> Distribution:
    """Returns the distribution of a length: fixed, or lognormal with its coefficient of variation."""
    if pd.isna(row[f"{name}_cv"]):
        return Fixed(value=whole(row, name))
    return Lognormal(mean=float(row[name]), cv=float(row[f"{name}_cv"]))


def predict(row: dict[str, Any], latency: LatencyLevel) -> dict[str, float]:
    """Computes the share of the speed that the adapters leave. Raises NotSimulatedError."""
    return kept(row, scenario_of(row, latency))


def kept(row: dict[str, Any], scenario: Scenario) -> dict[str, float]:
    """Simulates the run and the one that it is compared with, and returns the share."""
    workload: Any = scenario.workload
    without = (
        replace(scenario, workload=replace(workload, base_share=1.0))
        if row["baseline"] == "idle_slots"
        else replace(scenario, workload=workload.of, adapters=None)
    )
    return {METRIC: _speed(scenario, row["compared"]) / _speed(without, row["compared"])}


def _speed(scenario: Scenario, compared: str) -> float:
    """Returns the throughput, tokens/s, or the inverse of a mean latency."""
    records, table = simulated(scenario)
    if compared in ("tokens_per_s", "duration_s"):
        return float(table["output_tokens"].sum()) / float(records.end_s)
    return 1 / float(table[compared.replace("_ms", "_s")].mean())
