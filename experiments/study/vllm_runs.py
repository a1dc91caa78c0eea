"""Settings of a measured run of vLLM: from the columns of a table to the scenario of the engine.

Columns are named as vLLM's options, in short where the tables are: tp, pp, dp, ep. A column that is missing
or empty has vLLM's default. What cannot be simulated is refused with the reason; `unused` names columns of
which this module knows nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from experiments.study.measured_rows import whole
from experiments.study.presets import NotSimulatedError, base_model, base_scenario
from hwmodels.hf.quantization import ENGINE_NAMES
from hwmodels.levels import LatencyLevel
from hwmodels.model import ModelSpec
from sim.setup.scenario import Scenario

Row = Mapping[str, Any]

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}
WEIGHTS = {name: name for name, meaning in ENGINE_NAMES.items() if meaning.weights or meaning.moe_weights}
KV_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "fp8": "fp8", "fp8_e4m3": "fp8", "fp8_e5m2": "fp8"}
CHOICES = {
    "dtype": ("model.dtype", DTYPES),
    "quantization": ("model.weights", WEIGHTS),
    "kv_cache_dtype": ("model.kv_cache_dtype", KV_DTYPES),
}
"""Columns whose values have other names here: the setting, and its values by those of vLLM."""

SWITCHES = {
    "enable_chunked_prefill": ("batching.enable_chunked_prefill", False),
    "chunked_prefill": ("batching.enable_chunked_prefill", False),
    "enforce_eager": ("engine.cuda_graphs.enabled", True),
}
"""Columns of true and false: the setting, and whether it says the opposite."""

PREFIX_CACHING = ("enable_prefix_caching", "prefix_caching")
KV_BLOCKS = ("num_gpu_blocks", "total_kv_blocks")
LAYOUT = ("tp", "pp", "dp", "ep")
LIMITS = ("max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization", "max_model_len", "block_size")
OFF = ("false", "none", "0", "0.0")
NOT_SIMULATED = {
    "dcp": ("1", "1.0"),
    "pcp": ("1", "1.0"),
    "enable_lora": OFF,
    "speculative_config": OFF,
    "num_speculative_tokens": OFF,
    "enable_dbo": OFF,
}
"""Columns of options that are not simulated, and their values without effect, in lower case."""

ABOUT = ("run", "gpu", "model", "engine", "vllm", "requests", "seed", "id")
"""Columns that say which run it is; `engine` is the profile of its version of vLLM."""


def vllm_scenario(row: Row, latency: LatencyLevel, max_model_len: int | None) -> Scenario:
    """Returns the scenario of an engine with the row's settings, without its workload.

    `engine` in the row is the engine's profile, by default `vllm`, which is of 0.14 and later.

    With dp > 1, a dense model has as many replicas, behind vLLM's balancer; one with experts is a single
    replica with that many attention groups. Raises NotSimulatedError.
    """
    names = (str(row["model"]), str(row["gpu"]), str(row["engine"]) if given(row, "engine") else "vllm")
    model = base_model(names[0])
    ranks = whole(row, "dp") if given(row, "dp") else 1
    shared = ranks if model.has_experts else 1
    base = base_scenario(*names, (*_layout(row, model, ranks), *_settings(row, shared)))
    blocks = next((whole(row, name) * shared for name in KV_BLOCKS if given(row, name)), None)
    engine = replace(base.engine, max_model_len=max_model_len, num_kv_blocks=blocks)
    return replace(base, latency=latency, engine=engine)


def unused(columns: Iterable[str]) -> list[str]:
    """Returns the columns of a table of settings that have no effect here."""
    known = {
        *CHOICES,
        *SWITCHES,
        *PREFIX_CACHING,
        *KV_BLOCKS,
        *LAYOUT,
        *LIMITS,
        *NOT_SIMULATED,
        *ABOUT,
    }
    return [name for name in columns if name not in known]


def given(row: Row, name: str) -> bool:
    """Returns whether the row has a value in that column."""
    value = row.get(name)
    return value is not None and not pd.isna(value)


def switched_on(row: Row, names: Iterable[str], default: bool) -> bool:
    """Returns the value of the first of these columns that has one. Raises NotSimulatedError."""
    for name in names:
        if given(row, name):
            return _switch(row, name)
    return default


def _layout(row: Row, model: ModelSpec, ranks: int) -> Iterator[str]:
    tensor = whole(row, "tp")
    yield f"tensor_parallel_size={tensor}"
    if given(row, "pp"):
        yield f"pipeline_parallel_size={whole(row, 'pp')}"
    expert, devices = whole(row, "ep") if given(row, "ep") else 1, tensor * ranks
    if expert > 1 and not model.has_experts:
        raise NotSimulatedError(f"ep={expert}: must be 1, because {model.name} has no experts")
    if expert not in (1, devices):
        raise NotSimulatedError(
            f"ep={expert}: must be 1, or tp x dp = {devices}, over which vLLM distributes the experts"
        )
    if model.has_experts:
        yield from (f"attention_data_parallel_size={ranks}", f"expert_parallel_size={expert}")
    elif ranks > 1:
        yield from (f"replicas={ranks}", "routing=least_outstanding")


def _settings(row: Row, shared: int) -> Iterator[str]:
    """Yields overrides. shared: engines of vLLM in one replica; its limits are those of each."""
    for name in ("max_num_seqs", "max_num_batched_tokens"):
        yield f"engine.{name}={shared * whole(row, name)}"
    yield f"engine.gpu_memory_utilization={row['gpu_memory_utilization']}"
    if not switched_on(row, PREFIX_CACHING, default=True):
        yield "caching=paged"
    if given(row, "block_size"):
        yield f"caching.block_size={whole(row, 'block_size')}"
    for name, (key, values) in CHOICES.items():
        if given(row, name) and (text := str(row[name]).lower()) not in ("auto", "none"):
            if text not in values:
                raise NotSimulatedError(f"{name}={row[name]}: must be one of {', '.join(values)}")
            yield f"{key}={values[text]}"
    for name, (key, opposite) in SWITCHES.items():
        if given(row, name):
            yield f"{key}={str(_switch(row, name) != opposite).lower()}"
    for name, neutral in NOT_SIMULATED.items():
        if given(row, name) and str(row[name]).lower() not in neutral:
            raise NotSimulatedError(f"{name}={row[name]}: is not simulated; must be empty or {neutral[0]}")


def _switch(row: Row, name: str) -> bool:
    text = str(row[name]).lower()
    if text not in ("true", "false", "0", "1", "0.0", "1.0"):
        raise NotSimulatedError(f"{name}={row[name]}: must be true or false")
    return text in ("true", "1", "1.0")
