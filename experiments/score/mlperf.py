"""kind=mlperf: submissions to MLPerf Inference, data centre; columns as in mlperf_v5_1_llm.csv.

Offline: all samples of the data set at once; the measured time is at least 600 s. Server and Interactive: the
highest rate of Poisson arrivals at which the 99th percentiles of TTFT and TPOT meet the limits of the row.
The figure is output tokens/s of the whole system. Submissions are tuned by hand, in engine and settings
(TensorRT-LLM throughout), so they are upper bounds of what an engine reaches with its defaults.

No column has the layout. It is assumed: the fewest devices per replica whose weights take at most half of the
memory; mixtures of experts that do not fit one device share experts among the devices of a node, with data
parallel attention. All replicas get equal shares of the traffic, so one of them is simulated.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from experiments.score.length_shapes import capped_lognormal
from experiments.study.bisection import bisected, bracketed
from experiments.study.measured_rows import simulated, whole
from experiments.study.presets import NotSimulatedError, base_scenario
from hwmodels.levels import LatencyLevel
from sim.setup.scenario import Scenario
from sim.workload.arrivals import AllAtOnce, ArrivalProcess, Poisson
from sim.workload.distributions import Lengths
from sim.workload.synthetic import Synthetic

COLUMNS = ("id", "model", "scenario", "gpu", "gpus", "weights", "ttft_p99_limit_ms", "tpot_p99_limit_ms")
POSITIVE = ("gpus", "ttft_p99_limit_ms", "tpot_p99_limit_ms", "tokens_per_s")
METRICS = ("tokens_per_s",)

SCENARIOS = ("Offline", "Server", "Interactive")
FORMATS = {"fp4": "nvfp4", "fp8": "fp8", "bf16": "bf16"}
"""Formats of weights in submissions, as ours."""

MEASURED_S = 600.0
"""Least duration of a measurement; the load generator repeats the samples until then."""
FILLED_SHARE = 0.85
"""Share of that time from which on a simulation is long enough; a full batch is faster than the first try."""
WEIGHTS_SHARE = 0.5
"""Largest share of the memory that weights take in the layout that is assumed."""
PROBE_REQUESTS = 2000
"""Least requests of a simulation that decides whether a rate meets the limits; it also lasts MEASURED_S."""
FIRST_SHARE, FACTOR, PRECISION = 0.8, 1.25, 0.03
"""The search for a rate: its start as a share of the offline rate, the factor of a step, its precision."""


class System(NamedTuple):
    """Holds all that the figures of a submission depend on; equal ones are simulated once per process."""

    model: str
    gpu: str
    weights: str
    latency: LatencyLevel
    gpus: int


class DataSet(NamedTuple):
    """Lengths of a benchmark's samples in tokens. The means are published, the shapes are assumed."""

    samples: int
    mean_input: float
    mean_output: float
    max_input: int
    max_output: int


DATA_SETS = {
    # Samples, maxima: language/*/README.md of github.com/mlcommons/inference. Mean outputs: TOKENS_PER_SAMPLE
    # of its submission checker, which the reference model reaches (a few percent more than submissions). It
    # counts tokens (evaluate-accuracy.py). gpt-oss-120b is left out: its 6,396 samples have 1,278.20 output
    # tokens on average, but no mean input is published.
    "llama2-70b": DataSet(24_576, 294, 294.45, 1024, 1024),  # OpenOrca; mean input: about that of the outputs
    "mixtral-8x7b": DataSet(
        15_000, 300, 145.9, 2048, 1024
    ),  # OpenOrca, GSM8K, MBXP; mean input: our estimate
    "llama3.1-405b": DataSet(8_313, 9428, 684.68, 20_000, 2000),  # mlcommons.org/2025/04/llm-inference-v5
    # CNN-DailyMail. The checker's GEN_LEN counts characters (evaluation.py): 8,167,644 of the reference
    # model, 611 a sample, are about 128 tokens, which is the limit.
    "llama3.1-8b": DataSet(13_368, 778, 128, 2540, 128),
    "deepseek-r1": DataSet(4_388, 800, 3886.2274, 3136, 20_000),  # five sets; mean input: order of magnitude
}


def predict(row: dict[str, Any], latency: LatencyLevel) -> dict[str, float]:
    """Computes output tokens/s of all replicas. Raises NotSimulatedError or ValueError."""
    system = system_of(row, latency)
    if row["scenario"] == "Offline":
        rate = offline_rate(system)
    else:
        rate = highest_rate(system, limit_of(row, "ttft"), limit_of(row, "tpot"))
    return {"tokens_per_s": rate * replicas_of(system) * data_set_of(system.model).mean_output}


def scenario_of(row: dict[str, Any], latency: LatencyLevel) -> Scenario:
    """Returns the scenario of a system: its replicas, with the samples of the benchmark at once."""
    system = system_of(row, latency)
    data = data_set_of(system.model)
    requests = workload_of(data, AllAtOnce(), data.samples)
    return replace(replica_of(system), replicas=replicas_of(system), workload=requests)


def system_of(row: dict[str, Any], latency: LatencyLevel) -> System:
    """Returns the system of a row. Raises NotSimulatedError for values that are unknown."""
    if row["scenario"] not in SCENARIOS:
        raise NotSimulatedError(f"scenario={row['scenario']}: must be one of {', '.join(SCENARIOS)}")
    if row["weights"] not in FORMATS:
        raise NotSimulatedError(f"weights={row['weights']}: must be one of {', '.join(FORMATS)}")
    data_set_of(row["model"])
    return System(str(row["model"]), gpu_of(row), FORMATS[row["weights"]], latency, whole(row, "gpus"))


def replicas_of(system: System) -> int:
    """Returns the number of replicas. Raises NotSimulatedError if GPUs are left over."""
    devices = replica_of(system).layout.num_devices
    if system.gpus % devices:
        raise NotSimulatedError(
            f"gpus={system.gpus}: must be a multiple of {devices}, the GPUs of one replica"
        )
    return system.gpus // devices


@lru_cache(maxsize=64)
def replica_of(system: System) -> Scenario:
    """Returns one replica in the layout that is assumed."""
    base = base_scenario(system.model, system.gpu, "trtllm")
    experts = system.weights if base.model.has_experts else None
    model = base.model.with_weights(system.weights, experts, "fp8")
    base = replace(base, latency=system.latency, model=model)
    node = base.hardware.gpus_per_node
    sizes = [size for size in (1, 2, 4, 8) if size <= node]
    for size in sizes:
        candidate = with_devices(base, size)
        try:
            share = candidate.plan_memory().weights_bytes / base.hardware.memory_bytes
        except ValueError:  # the weights or one sequence do not fit
            continue
        if share <= WEIGHTS_SHARE:
            return candidate
    return with_devices(base, sizes[-1])


def with_devices(base: Scenario, size: int) -> Scenario:
    """Returns a replica of so many devices; see the module for the layout of experts."""
    if not base.model.has_experts or size == 1:
        return replace(base, tensor_parallel_size=size)
    node = base.hardware.gpus_per_node
    limits = replace(
        base.engine,
        max_num_seqs=node * base.engine.max_num_seqs,
        max_num_batched_tokens=node * base.engine.max_num_batched_tokens,
    )
    batching: Any = base.batching
    return replace(
        base,
        engine=limits,
        batching=replace(batching, max_num_batched_tokens=limits.max_num_batched_tokens),
        attention_data_parallel_size=node,
        expert_parallel_size=node,
    )


def workload_of(data: DataSet, arrivals: ArrivalProcess, num_requests: int) -> Synthetic:
    """Returns requests with the lengths of the data set."""
    lengths = Lengths(
        prompt_tokens=capped_lognormal(data.mean_input, data.max_input),
        output_tokens=capped_lognormal(data.mean_output, data.max_output),
    )
    return Synthetic(arrivals=arrivals, lengths=lengths, num_requests=num_requests)


@lru_cache(maxsize=64)
def offline_rate(system: System) -> float:
    """Computes requests/s of one replica that gets its share of the samples at once.

    If that takes less than a measurement, the load generator sends more samples, as many as fill it.
    """
    data = data_set_of(system.model)
    count = -(-data.samples // replicas_of(system))
    while (seconds := offline_seconds(system, data, count)) < FILLED_SHARE * MEASURED_S:
        count = ceil(count * MEASURED_S / seconds)
    return count / seconds


def offline_seconds(system: System, data: DataSet, count: int) -> float:
    """Computes the seconds in which one replica answers so many requests that arrive at once."""
    records, _ = simulated(replace(replica_of(system), workload=workload_of(data, AllAtOnce(), count)))
    return float(records.end_s)


@lru_cache(maxsize=64)
def highest_rate(system: System, ttft_s: float, tpot_s: float) -> float:
    """Computes the answers/s of one replica at the highest rate within the limits of the 99th percentiles.

    They are counted until the last answer ends, as by the load generator. Raises NotSimulatedError if no rate
    is within the limits.
    """
    data, replica = data_set_of(system.model), replica_of(system)
    answers_per_s: dict[float, float] = {}

    def meets(rate: float) -> bool:
        count = max(PROBE_REQUESTS, ceil(rate * MEASURED_S))
        workload = workload_of(data, Poisson(rate_per_s=rate), count)
        records, table = simulated(replace(replica, workload=workload))
        answers_per_s[rate] = count / float(records.end_s)
        ttft, tpot = (float(np.nanquantile(table[f"{name}_s"], 0.99)) for name in ("ttft", "tpot"))
        return ttft <= ttft_s and tpot <= tpot_s

    bracket = bracketed(meets, FIRST_SHARE * offline_rate(system), FACTOR)
    found = bisected(meets, bracket, PRECISION).low
    if not found:
        raise NotSimulatedError(
            f"ttft_p99_limit_ms={1e3 * ttft_s:g}, tpot_p99_limit_ms={1e3 * tpot_s:g}: no rate meets them"
        )
    return answers_per_s[found]


def data_set_of(model: str) -> DataSet:
    """Returns the data set of a benchmark. Raises NotSimulatedError for an unknown one."""
    if model not in DATA_SETS:
        known = ", ".join(DATA_SETS)
        raise NotSimulatedError(f"model={model}: its data set is unknown; known: {known}")
    return DATA_SETS[model]


def gpu_of(row: dict[str, Any]) -> str:
    """Returns the GPU without maker and memory: B200-SXM of NVIDIA B200-SXM-180GB."""
    name = re.sub(r"^(Virtualized )?(NVIDIA )?", "", str(row["gpu"]))
    return re.sub(r"(-\d+GB| Blackwell Server Edition)$", lambda m: "" if "GB" in m[0] else " Server", name)


def limit_of(row: dict[str, Any], name: str) -> float:
    """Returns the limit of a 99th percentile in seconds. Raises NotSimulatedError if it is missing."""
    value = row.get(f"{name}_p99_limit_ms")
    if value is None or pd.isna(value):
        raise NotSimulatedError(f"{name}_p99_limit_ms is missing: scenario={row['scenario']} needs it")
    return float(value) / 1e3
