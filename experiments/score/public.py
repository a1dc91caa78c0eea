"""kind=public: measured rows of public sources; columns as in hwmodels/trust/public_rows.csv.

A row is one run of a load generator against one or more equal replicas. Its traffic:

    arrivals    all_at_once: num_requests together. closed_loop: `concurrency` clients without think time,
                each of which sends its next one when the last one has ended. poisson, constant: rate_per_s
    lengths     fixed: all have the mean isl and osl. uniform: around these means, at most isl_max and
                osl_max. lognormal: with these means, cut at isl_max and osl_max

A source states some statistics of a quantity only. The one that is compared is the mean, or else the median
(`STATED`); of throughputs, output tokens/s, or else all tokens/s, or else requests/s. Rows of part=fit may
serve to set constants; those of part=test may not. A whole source belongs to one part.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from experiments.app.launch_lines.versions import WITH_ASYNC_SCHEDULING
from experiments.score.engine_versions import engine_of
from experiments.score.layouts import layout_of
from experiments.score.length_shapes import capped_lognormal
from experiments.score.silicon import OWN_FORMATS, checkpoint_format
from experiments.study.measured_rows import check_context, simulated, whole
from experiments.study.presets import NotSimulatedError, base_model, base_scenario, preset
from hwmodels.levels import LatencyLevel
from hwmodels.model import ModelSpec
from sim.settings.errors import ConfigError
from sim.setup.scenario import Scenario
from sim.workload.arrivals import AllAtOnce, ArrivalProcess, ClosedLoop, Constant, Poisson
from sim.workload.distributions import Distribution, Fixed, Lengths, Uniform
from sim.workload.synthetic import Synthetic

SIZES = ("tp_size", "pp_size", "attention_dp_size")
COLUMNS = (
    "id",
    "part",
    "source",
    "date",
    "backend",
    "backend_version",
    "model",
    "weights",
    "gpu",
    "gpus",
    *SIZES,
    "moe_ep_size",
    "arrivals",
    "concurrency",
    "rate_per_s",
    "num_requests",
    "lengths",
    "isl",
    "osl",
)
STATED = {
    "ttft_ms": ("ttft_mean_ms", "ttft_p50_ms"),
    "tpot_ms": ("tpot_mean_ms", "tpot_p50_ms", "itl_mean_ms"),
    "e2e_ms": ("e2e_mean_ms", "e2e_p50_ms"),
    "tokens_per_s": ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s"),
}
"""The compared quantities, and the columns of which the first that a row states is compared."""
TAILS = ("ttft_p99_ms", "tpot_p99_ms")
METRICS = (*STATED, *TAILS)
MEASURED = (*(name for names in STATED.values() for name in names), *TAILS)
LIMITS = ("max_num_seqs", "max_num_batched_tokens")
POSITIVE = (
    *MEASURED,
    *SIZES,
    *LIMITS,
    "max_model_len",
    "memory_fraction",
    "moe_ep_size",
    "gpus",
    "concurrency",
    "rate_per_s",
    "num_requests",
    "isl",
    "osl",
    "isl_max",
    "osl_max",
)
GROUPS = ("part", "arch", "backend", "gpu", "model", "arrivals", "source")

CHOICES = {
    "part": ("fit", "test"),
    "arrivals": ("all_at_once", "closed_loop", "poisson", "constant"),
    "lengths": ("fixed", "uniform", "lognormal"),
}
IN_PROCESS = "in_process"
"""Value of the column `client` if it called the engine without HTTP; an empty cell: over HTTP."""
SWITCHES = ("async_scheduling", "cuda_graphs")
"""Columns of true and false; an empty cell: the engine's default."""
NEEDED = {
    "all_at_once": ("num_requests",),
    "closed_loop": ("concurrency",),
    "poisson": ("rate_per_s", "num_requests"),
    "constant": ("rate_per_s", "num_requests"),
}
"""Columns without which a row of these arrivals is no workload."""
TRTLLM_SERVE = {"enable_chunked_context": False, "capacity_scheduler_policy": "guaranteed_no_evict"}
"""What TensorRT-LLM's server does unless a flag says otherwise; the profiles are those of tuned servers."""
REQUESTS_PER_CLIENT = 10
"""Requests of each client of a closed loop whose source does not count them."""


def checked(table: pd.DataFrame, path: Path) -> pd.DataFrame:
    """Returns the table with the compared quantities and `arch`, dense or moe.

    Raises ConfigError with the file, the row and the column for a row that is no measurement of a workload.
    """
    rows: Any = table.to_dict("records")
    for row in rows:
        wrong = wrong_value(row)
        if wrong is not None:
            raise ConfigError(f"measured={path}: id={row['id']}: {wrong}")
    found = {name: [quantity(row, names) for row in rows] for name, names in STATED.items()}
    return table.assign(arch=[architecture(row) for row in rows], **found)


def wrong_value(row: dict[str, Any]) -> str | None:
    """Returns what is wrong with a row: the column, its value and what it must be; None: nothing."""
    for name, allowed in CHOICES.items():
        if row[name] not in allowed:
            return f"{name}={row[name]}: must be one of {', '.join(allowed)}"
    for name in SWITCHES:
        if pd.notna(row.get(name)) and str(row[name]).lower() not in ("true", "false"):
            return f"{name}={row[name]}: must be true, false or empty"
    if pd.notna(client := row.get("client")) and client != IN_PROCESS:
        return f"client={client}: must be {IN_PROCESS} or empty"
    for name in NEEDED[row["arrivals"]]:
        if pd.isna(row[name]):
            return f"{name} is missing: arrivals={row['arrivals']} needs it"
    for name in ("isl", "osl"):
        longest = row.get(f"{name}_max")
        if row["lengths"] != "fixed" and (pd.isna(longest) or longest < row[name]):
            return f"{name}_max={longest}: must be >= {name}={row[name]:g}, as lengths={row['lengths']}"
    if not any(pd.notna(row.get(name)) for name in MEASURED):
        return f"no measured value; give one of {', '.join(MEASURED)}"
    return None


def architecture(row: dict[str, Any]) -> str:
    """Returns moe or dense, or unknown for a model, a GPU or an engine without a preset."""
    try:
        preset("hardware", row["gpu"])
        preset("engine", profile_of(row))
        has_experts = base_model(row["model"]).has_experts
    except NotSimulatedError:
        return "unknown"
    return "moe" if has_experts else "dense"


def profile_of(row: dict[str, Any]) -> str:
    """Returns the engine profile of the row's version, with asynchronous scheduling if it was switched on."""
    profile = engine_of({**row, "measured_date": row["date"]})
    if row["backend"] == "vllm" and row["pp_size"] > 1 and str(row["backend_version"]).startswith("0.8"):
        return "vllm_v0"  # v1 had no pipelines of its own processes before 0.9, and fell back
    switched = str(row.get("async_scheduling")).lower() == "true"
    return WITH_ASYNC_SCHEDULING.get(profile, profile) if switched else profile


def stated(row: dict[str, Any], names: tuple[str, ...]) -> str:
    """Returns the first of these columns that the row states; without one, the first."""
    return next((name for name in names if pd.notna(row.get(name))), names[0])


def quantity(row: dict[str, Any], names: tuple[str, ...]) -> float:
    """Returns the measured value that is compared; NaN if the row states none."""
    value = row.get(stated(row, names))
    return np.nan if value is None else float(value)


def predict(row: dict[str, Any], latency: LatencyLevel) -> dict[str, float]:
    """Computes `METRICS`, in the statistic that the row states. Raises NotSimulatedError or ValueError."""
    figures = figures_of(scenario_of(row, latency))
    compared = {name: figures[stated(row, names)] for name, names in STATED.items()}
    return {**compared, **{name: figures[name] for name in TAILS}}


def figures_of(scenario: Scenario) -> dict[str, float]:
    """Simulates the scenario and computes all of `MEASURED`. Raises NotSimulatedError."""
    records, table = simulated(scenario)
    tpot, seconds = table["tpot_s"].dropna(), float(records.end_s)
    figures = {"requests_per_s": len(table) / seconds}
    for name, column in (("ttft", table["ttft_s"]), ("tpot", tpot), ("e2e", table["e2e_s"])):
        figures[f"{name}_mean_ms"] = 1e3 * float(column.mean())
        figures[f"{name}_p50_ms"] = 1e3 * float(column.quantile(0.5))
        figures[f"{name}_p99_ms"] = 1e3 * float(column.quantile(0.99))
    gaps = float((table["output_tokens"] - 1).sum())
    spent = float((table["e2e_s"] - table["ttft_s"]).sum())
    figures["itl_mean_ms"] = 1e3 * spent / gaps if gaps else np.nan
    figures["output_tokens_per_s"] = float(table["output_tokens"].sum()) / seconds
    prompts = float(table["prompt_tokens"].sum()) / seconds
    figures["total_tokens_per_s"] = figures["output_tokens_per_s"] + prompts
    return figures


def scenario_of(row: dict[str, Any], latency: LatencyLevel) -> Scenario:
    """Returns the scenario of a row. Raises NotSimulatedError, or ValueError for a layout that cannot be."""
    base = base_scenario(row["model"], row["gpu"], profile_of(row))
    layout, devices = layout_of({**row, "moe_tp_size": expert_cut(row)}, base)
    gpus = devices if pd.isna(row["gpus"]) else whole(row, "gpus")
    if gpus % devices:
        raise NotSimulatedError(f"gpus={gpus}: must be a multiple of {devices}, the GPUs of one replica")
    check_context(round(row["isl"]), round(row["osl"]), base.model)
    share = layout.attention_data_parallel_size
    limits: dict[str, Any] = {name: share * getattr(base.engine, name) for name in LIMITS}
    limits |= {name: share * whole(row, name) for name in LIMITS if pd.notna(row.get(name))}
    if pd.notna(row.get("max_model_len")):
        limits["max_model_len"] = whole(row, "max_model_len")
    if pd.notna(fraction := row.get("memory_fraction")):
        limits["gpu_memory_utilization"] = float(fraction)
    if pd.notna(switched := row.get("cuda_graphs")):
        enabled = str(switched).lower() == "true"
        limits["cuda_graphs"] = replace(base.engine.cuda_graphs, enabled=enabled)
    limits["flashinfer_sampler"] = samples_with_flashinfer(row)
    if row.get("client") == IN_PROCESS:
        limits["frontend_s"] = 0.0
    batching: Any = base.batching
    if hasattr(batching, "max_num_batched_tokens"):
        batching = replace(batching, max_num_batched_tokens=limits["max_num_batched_tokens"])
    if row["backend"] == "trtllm" and row.get("client") != IN_PROCESS:
        batching = replace(batching, **TRTLLM_SERVE)
    return replace(
        base,
        latency=latency,
        model=model_of(row, base),
        engine=replace(base.engine, **limits),
        batching=batching,
        replicas=gpus // devices,
        workload=workload_of(row),
        tensor_parallel_size=layout.tensor_parallel_size,
        pipeline_parallel_size=layout.pipeline_parallel_size,
        attention_data_parallel_size=share,
        expert_parallel_size=layout.expert_parallel_size,
    )


def samples_with_flashinfer(row: dict[str, Any]) -> bool:
    """Returns whether FlashInfer sampled, as in vLLM's images of 0.8.5 to 0.11.0, which have it installed."""
    found = re.match(r"0\.(\d+)\.(\d+)", str(row.get("backend_version")))
    return (
        row["backend"] == "vllm" and found is not None and (8, 5) <= (int(found[1]), int(found[2])) <= (11, 0)
    )


def expert_cut(row: dict[str, Any]) -> int | None:
    """Returns the ranks that cut each expert: those that do not distribute them."""
    if pd.isna(row["moe_ep_size"]):
        return None
    ranks, groups = whole(row, "tp_size") * whole(row, "attention_dp_size"), whole(row, "moe_ep_size")
    if ranks % groups:
        raise NotSimulatedError(f"moe_ep_size={groups}: must divide tp_size x attention_dp_size = {ranks}")
    return ranks // groups


def model_of(row: dict[str, Any], base: Scenario) -> ModelSpec:
    """Returns the model in the number formats of the row."""
    model = base.model
    kv = None if pd.isna(row.get("kv_cache_dtype")) else row["kv_cache_dtype"]
    if model.name in OWN_FORMATS:
        own = "mxfp4_mxfp8" if "fp4" in base.hardware.peak_flops_per_s else OWN_FORMATS[model.name]
        return model.with_weights(model.weights, own, kv)
    weights = checkpoint_format(row["weights"], base)
    return model.with_weights(weights, weights if model.has_experts else None, kv)


def workload_of(row: dict[str, Any]) -> Synthetic:
    """Returns the requests of the row."""
    arrivals: ArrivalProcess | ClosedLoop = AllAtOnce()
    if row["arrivals"] == "closed_loop":
        arrivals = ClosedLoop(num_users=whole(row, "concurrency"), think_time_s=None, ramp_up_s=0.0)
    elif row["arrivals"] != "all_at_once":
        process = Poisson if row["arrivals"] == "poisson" else Constant
        arrivals = process(rate_per_s=float(row["rate_per_s"]))
    if pd.isna(row["num_requests"]):
        count = REQUESTS_PER_CLIENT * whole(row, "concurrency")
    else:
        count = whole(row, "num_requests")
    shape = partial(distribution, str(row["lengths"]))
    lengths = Lengths(
        prompt_tokens=shape(row["isl"], row.get("isl_max")),
        output_tokens=shape(row["osl"], row.get("osl_max")),
    )
    return Synthetic(arrivals=arrivals, lengths=lengths, num_requests=count, max_tokens="exact")


def distribution(shape: str, mean: float, most: Any) -> Distribution:
    """Returns the distribution of a length with this mean."""
    if shape == "fixed":
        return Fixed(value=round(mean))
    if shape == "uniform":
        return Uniform(low=max(1, round(2 * mean - most)), high=round(most))
    return capped_lognormal(float(mean), round(most))
