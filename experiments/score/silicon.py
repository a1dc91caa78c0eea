"""Rows of kind=silicon with mode=agg: whole engines at a fixed number of clients.

A row is a closed loop: `concurrency` clients start at once, and each sends its next request when the previous
one has finished, on average ten requests each. InferenceMAX draws lengths uniformly from 0.8 to 1.0 of the
nominal ones; for other sources the inputs are nominal, and the outputs drawn likewise or nominal (`IN_STEP`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from experiments.score.drafts import with_drafts
from experiments.score.engine_versions import engine_of
from experiments.score.layouts import layout_of
from experiments.score.recipes import SGLANG_MODELS, Recipe, recipe_of
from experiments.study.measured_rows import check_context, whole
from experiments.study.presets import NotSimulatedError, base_scenario, load_generator
from hwmodels.levels import LatencyLevel
from hwmodels.model import ModelSpec
from policies.batching import Batching
from sim.setup.scenario import Scenario
from sim.workload.arrivals import ClosedLoop
from sim.workload.distributions import Distribution, Fixed, Lengths, Uniform
from sim.workload.synthetic import Synthetic

COLUMNS = (
    "id",
    "source",
    "backend",
    "model",
    "gpu",
    "weights",
    "mode",
    "isl",
    "osl",
    "concurrency",
    "tp_size",
    "pp_size",
    "attention_dp_size",
    "moe_tp_size",
    "moe_ep_size",
    "gpus",
)
POSITIVE = ("isl", "osl", "concurrency", "tp_size", "ttft_ms", "tpot_ms")

REQUESTS_PER_CLIENT = 10

OWN_FORMATS = {"gpt-oss-120b": "mxfp4", "gpt-oss-20b": "mxfp4"}
"""Models whose experts exist in one number format only, whatever label a table gives them."""

GIVEN_SHARE = 0.9
"""Share of memory for an engine without a default, SGLang: launch scripts of benchmarks set 0.8 to 0.94."""

IN_STEP = {("nvidia-lab", "sglang", "0.5.1.post1")}
"""Sources, engines and versions whose outputs all had the nominal length, so that clients stay in step."""


def scenario_of(row: dict[str, Any], latency: LatencyLevel) -> Scenario:
    """Returns the scenario of a row. Raises NotSimulatedError, or ValueError for a layout that cannot be."""
    clients, prompt, output = (whole(row, name) for name in ("concurrency", "isl", "osl"))
    base = base_scenario(row["model"], row["gpu"], engine_of(row))
    check_context(prompt, output, base.model)
    model, (layout, devices) = model_of(row, base), layout_of(row, base)
    gpus = devices if pd.isna(row["gpus"]) else whole(row, "gpus")
    if gpus % devices:
        raise NotSimulatedError(f"gpus={gpus}: must be a multiple of {devices}, the GPUs of one replica")
    share = layout.attention_data_parallel_size
    recipe = recipe_of(row)
    budget = share * (recipe.max_num_batched_tokens or base.max_num_batched_tokens)
    host = base.engine.host
    engine = replace(
        base.engine,
        gpu_memory_utilization=base.engine.gpu_memory_utilization or GIVEN_SHARE,
        kernels=replace(
            base.engine.kernels, moe_backend=recipe.moe_backend or base.engine.kernels.moe_backend
        ),
        host=host if recipe.launch_s is None else replace(host, launch_s=recipe.launch_s),
        max_num_batched_tokens=budget,
        max_num_seqs=base.engine.max_num_seqs * share,
        max_model_len=min(model.max_position_embeddings, prompt + output + 256),
        scheduler_recv_interval=recipe.scheduler_recv_interval,
    )
    return replace(
        base,
        client=load_generator(client_of(row)),
        latency=with_drafts(latency, row),
        model=model,
        engine=engine,
        batching=configured(base.batching, budget, recipe),
        replicas=gpus // devices,
        workload=closed_loop(row, clients),
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        attention_data_parallel_size=share,
        expert_parallel_size=layout.expert_parallel_size,
    )


def client_of(row: dict[str, Any]) -> str:
    """Returns the load generator of the row's source; `dynamo`: one behind NVIDIA Dynamo."""
    if row.get("source") == "inferencemax" or row["model"] in SGLANG_MODELS:  # the lab repeated such runs
        return "inferencex"
    behind_dynamo = row["backend"] == "sglang" or engine_of(row) == "tensorrt_llm_1_0"
    return "dynamo" if row.get("source") == "nvidia-lab" and behind_dynamo else "none"


def model_of(row: dict[str, Any], base: Scenario) -> ModelSpec:
    """Returns the model in the number formats of the row."""
    model = base.model
    if row["model"] in OWN_FORMATS:
        on_blackwell = "fp4" in base.hardware.peak_flops_per_s
        own = "mxfp4_mxfp8" if on_blackwell else OWN_FORMATS[row["model"]]
        return model.with_weights(model.weights, own)
    weights, moe = (checkpoint_format(row.get(name), base) for name in ("weights", "moe_weights"))
    return model.with_weights(weights, moe if model.has_experts else None, kv_cache_dtype(row))


def closed_loop(row: dict[str, Any], clients: int) -> Synthetic:
    """Returns the requests of so many clients, each of which sends the next one when the last one ends."""
    return Synthetic(
        arrivals=ClosedLoop(num_users=clients, think_time_s=Fixed(value=0.0), ramp_up_s=0.0),
        lengths=lengths_of(row),
        num_requests=REQUESTS_PER_CLIENT * clients,
        max_tokens="exact",
    )


def configured(batching: Batching, max_num_batched_tokens: int, recipe: Recipe) -> Batching:
    """Returns the policy with this budget (every engine here has one) and the recipe's settings."""
    policy: Any = batching
    changed: Batching = replace(policy, max_num_batched_tokens=max_num_batched_tokens, **recipe.batching())
    return changed


def lengths_of(row: dict[str, Any]) -> Lengths:
    """Returns the distributions of prompt and output tokens that the row's benchmark draws from."""
    if row["source"] == "inferencemax":
        return Lengths(
            prompt_tokens=Uniform(low=round(0.8 * row["isl"]), high=round(row["isl"])),
            output_tokens=Uniform(low=round(0.8 * row["osl"]), high=round(row["osl"])),
        )
    answers: Distribution = Uniform(low=round(0.8 * row["osl"]), high=round(row["osl"]))
    if (row["source"], row["backend"], row.get("backend_version")) in IN_STEP:
        answers = Fixed(value=row["osl"])
    return Lengths(prompt_tokens=Fixed(value=row["isl"]), output_tokens=answers)


def checkpoint_format(label: Any, base: Scenario) -> str | None:
    """Returns the format that a label means: fp8 checkpoints of MoE models have scales per block."""
    if not isinstance(label, str):
        return None
    return "fp8_block" if label == "fp8" and base.model.has_experts else label


def kv_cache_dtype(row: dict[str, Any]) -> str:
    """Returns the KV cache dtype: recipes of fp8 and nvfp4 checkpoints store KV in fp8."""
    return "auto" if pd.isna(row["weights"]) or row["weights"] in ("bf16", "int4_wo") else "fp8"
