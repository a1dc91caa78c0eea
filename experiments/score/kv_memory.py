"""kind=kv_memory: memory for KV that engines logged when they started; columns as in kv_memory_logs.csv.

The tokens are those of all layers, which is how vLLM counts them for a model with windows too: "GPU KV cache
size" of its log. The logs of half of the models served to set the constants of
`hwmodels.iterations.memory`; the errors of the others ("kept") are those to expect.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.study.measured_rows import whole
from experiments.study.presets import NotSimulatedError, base_scenario
from hwmodels.host import GIB
from hwmodels.levels import LatencyLevel
from policies.caching.block_tables import KvLayerKind, kv_groups
from sim.setup.scenario import Scenario

COLUMNS = ("id", "engine", "version", "model", "gpu", "tp", "memory_fraction", "kv_tokens")
METRICS = ("kv_tokens", "kv_gib")
POSITIVE = (
    "tp",
    "pp",
    "ep",
    "memory_fraction",
    "max_num_batched_tokens",
    "max_num_seqs",
    "kv_tokens",
    "kv_gib",
)
GROUPS = ("half", "engine", "version", "gpu", "model")
LIMITS = ("max_num_batched_tokens", "max_num_seqs")
SIZES = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "ep": "expert_parallel_size"}


def with_halves(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Returns the table with the column `half`: fitted or kept, by a hash of the model's name."""
    return table.assign(half=["fitted" if is_fitted(str(name)) else "kept" for name in table["model"]])


def is_fitted(model: str) -> bool:
    """Tests whether the logs of a model served to set constants: the first byte of a hash is even."""
    return hashlib.blake2b(model.encode(), digest_size=8).digest()[0] % 2 == 0


def predict(row: dict[str, Any], latency: LatencyLevel) -> dict[str, float]:
    """Computes `METRICS` of one device; 0 where the model would not fit. Raises NotSimulatedError."""
    scenario = scenario_of(row, latency)
    try:
        plan = scenario.plan_memory()
    except ValueError:  # the engine did start
        return {"kv_tokens": 0.0, "kv_gib": 0.0}
    room = plan.usable_bytes - plan.fixed_bytes + plan.window_and_state_bytes
    return {"kv_tokens": room / bytes_per_token(scenario), "kv_gib": room / GIB}


def bytes_per_token(scenario: Scenario) -> float:
    """Returns the KV bytes of a token in all layers on one device, padding of vLLM's groups included."""
    model, layout = scenario.model, scenario.layout
    layers = model.kv_layers(layout.tensor_parallel_size)
    whole_model = sum(each.count * each.bytes_per_token for each in layers)
    if len({each.bytes_per_token for each in layers}) == 1:
        groups = kv_groups(
            KvLayerKind(each.count, each.window, each.window_is_chunk, each.bytes_per_token)
            for each in layers
        )
        whole_model = len(groups) * groups[0].num_layers * layers[0].bytes_per_token
    return whole_model * layout.stage_share(model.num_layers)


def scenario_of(row: dict[str, Any], latency: LatencyLevel) -> Scenario:
    """Returns the scenario with the log's settings; raises NotSimulatedError."""
    given = {name: value for name, value in row.items() if not pd.isna(value) and value != ""}
    base = base_scenario(row["model"], row["gpu"], row["engine"])
    model = base.model.with_weights(
        given.get("weights", base.model.weights), base.model.moe_weights, given.get("kv_cache_dtype")
    )
    limits: dict[str, Any] = {name: whole(row, name) for name in LIMITS if name in given}
    version = str(given["version"]) if "version" in given else None
    try:
        engine = replace(
            base.engine, gpu_memory_utilization=float(row["memory_fraction"]), version=version, **limits
        )
        if "cuda_graphs" in given:
            enabled = str(given["cuda_graphs"]).lower() == "true"
            engine = replace(engine, cuda_graphs=replace(engine.cuda_graphs, enabled=enabled))
        batching: Any = base.batching
        if "max_num_batched_tokens" in limits and hasattr(batching, "max_num_batched_tokens"):
            batching = replace(batching, max_num_batched_tokens=limits["max_num_batched_tokens"])
        sizes: dict[str, Any] = {SIZES[name]: whole(row, name) for name in SIZES if name in given}
        return replace(base, model=model, engine=engine, batching=batching, latency=latency, **sizes)
    except ValueError as error:
        raise NotSimulatedError(str(error)) from error
