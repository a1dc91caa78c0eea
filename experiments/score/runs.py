"""kind=experiments: open-loop runs of vLLM; columns as in vllm_experiments/experiments.csv.

The load is that of inference-perf (kubernetes-sigs): a stage of "constant" rate sends rate x seconds requests
at exponential gaps, scaled so that they fill the stage, and a few prompts are sent in turn, again and again.
Every answer has the length that the workload asks for. (mean_output_tokens_est is not used: it was derived
from measured times.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd

from experiments.score.engine_versions import engine_of
from experiments.study.measured_rows import check_context, simulated, whole
from experiments.study.presets import NotSimulatedError, base_model
from experiments.study.vllm_runs import vllm_scenario
from hwmodels.levels import LatencyLevel
from policies.caching.paged import Paged
from policies.core.request import Segment
from sim.metrics.definitions import describe
from sim.metrics.kv_use import held_back
from sim.setup.scenario import Scenario
from sim.workload.base import Source, WorkloadNotes
from sim.workload.chunks import TableSource
from sim.workload.distributions import stream

COLUMNS = (
    "id",
    "model",
    "gpu",
    "tp",
    "precision",
    "stages",
    "system_prompt_len",
    "question_len",
    "output_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "gpu_memory_utilization",
    "prefix_caching",
)
METRICS = (
    "ttft_mean_ms",
    "ttft_p90_ms",
    "ttft_p99_ms",
    "itl_mean_ms",
    "e2e_mean_ms",
    "e2e_p90_ms",
    "e2e_p99_ms",
)
HELD_BACK_SHARE = "held_back_share"
"""Name of the share of requests that waited for a sequence slot or KV memory, which was not measured."""
POSITIVE = ("tp", "system_prompt_len", "question_len", "output_len", *METRICS)

MAX_MODEL_LEN = 4096
"""Context length with which the runs were served, unless the model's is shorter."""

MOST_REQUESTS = 10_000_000
"""Limit of the requests of a stage, against wrong units; the largest published runs have thousands."""

WEIGHTS = {"FP16": None, "BF16": None, "FP8": "fp8"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompts:
    """Distinct prompts in groups; those of one group begin with the same system prompt."""

    groups: int
    per_group: int
    system_tokens: int

    def in_turn(self, seed: int) -> Callable[[int, int], tuple[Segment, ...]]:
        """Returns the content of request number `row`: all prompts in a random order, over and over."""
        order = stream(seed, "prompts").permutation(self.groups * self.per_group).tolist()

        def content(row: int, num_tokens: int) -> tuple[Segment, ...]:
            prompt = order[row % len(order)]
            system = Segment(prompt // self.per_group, self.system_tokens)
            return system, Segment(self.groups + prompt, num_tokens - self.system_tokens)

        return content


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """Workload with a rate per stage, one stage after the other, and requests of equal lengths."""

    stages: tuple[tuple[float, float], ...]
    """(requests/s, seconds) of each stage."""
    prompt_tokens: int
    output_tokens: int
    prompts: Prompts | None = None
    """The prompts that are sent in turn; None: all contents differ."""

    def source(self, *, seed: int, max_model_len: int) -> Source:
        rng, start_s, times = stream(seed, "arrivals"), 0.0, []
        for rate, seconds in self.stages:
            gaps_s = rng.exponential(size=int(rate * seconds))
            times.append(start_s + seconds * np.cumsum(gaps_s) / gaps_s.sum())
            start_s += seconds
        arrival_s = np.concatenate(times)
        count = len(arrival_s)
        return TableSource(
            arrival_s=arrival_s,
            prompt_tokens=np.full(count, self.prompt_tokens, dtype=np.int64),
            output_tokens=np.full(count, self.output_tokens, dtype=np.int64),
            notes=WorkloadNotes(),
            segments=None if self.prompts is None else self.prompts.in_turn(seed),
        )


def predict(row: dict[str, Any], latency: LatencyLevel) -> dict[str, float]:
    """Computes `METRICS` over all requests of the run. Raises NotSimulatedError or ValueError."""
    figures = figures_of(scenario_of(row, latency))
    return {name: figures[name] for name in METRICS}


def figures_of(scenario: Scenario) -> dict[str, float]:
    """Simulates the scenario and computes `METRICS` and `HELD_BACK_SHARE`. Raises NotSimulatedError."""
    records, table = simulated(scenario)
    figures = {name: describe(table[f"{name}_s"].to_numpy(dtype=np.float64)) for name in ("ttft", "e2e")}
    predicted = {
        f"{name}_{statistic}_ms": 1e3 * figures[name][f"{statistic}_s"]
        for name in figures
        for statistic in ("mean", "p90", "p99")
    }
    return {
        **predicted,
        "itl_mean_ms": 1e3 * describe(records.gap_s, records.gap_count)["mean_s"],
        HELD_BACK_SHARE: float(held_back(table).mean()),
    }


def scenario_of(row: dict[str, Any], latency: LatencyLevel) -> Scenario:
    """Returns the scenario of a measured run of vLLM; raises NotSimulatedError."""
    model = base_model(row["model"])
    if row["precision"] not in WEIGHTS:
        raise NotSimulatedError(f"precision={row['precision']}: must be one of {', '.join(WEIGHTS)}")
    prompt, output = whole(row, "system_prompt_len") + whole(row, "question_len"), whole(row, "output_len")
    context = min(MAX_MODEL_LEN, model.max_position_embeddings)
    check_context(prompt, output, model, context)
    profile = engine_of({"backend": "vllm", "backend_version": row.get("vllm")})
    base = vllm_scenario({**row, "engine": profile}, latency, context)
    prompts, caching = prompts_of(row), base.caching
    if row["prefix_caching"] and prompts is None:
        caching = Paged(block_size=caching.block_size, presume_cached=True)
    return replace(
        base,
        model=model.with_weights(WEIGHTS[row["precision"]] or model.weights),
        caching=caching,
        workload=Stages(
            stages=tuple(stage_of(text, row["id"]) for text in str(row["stages"]).split(";")),
            prompt_tokens=prompt,
            output_tokens=output,
            prompts=prompts,
        ),
    )


def prompts_of(row: dict[str, Any]) -> Prompts | None:
    """Returns the prompts of a run with prefix caching; None without it, or if the row does not count them.

    Without their number, the prompts of a run with prefix caching are presumed to be cached.
    """
    counts = [row.get(name) for name in ("prompt_groups", "prompts_per_group")]
    if not row["prefix_caching"] or any(count is None or pd.isna(count) for count in counts):
        return None
    return Prompts(
        groups=whole(row, "prompt_groups"),
        per_group=whole(row, "prompts_per_group"),
        system_tokens=whole(row, "system_prompt_len"),
    )


def stage_of(text: str, row_id: str) -> tuple[float, float]:
    """Parses a stage: 8x600 is 8 requests/s for 600 s."""
    rate, _, seconds = text.partition("x")
    try:
        stage = float(rate), float(seconds)
    except ValueError:
        raise NotSimulatedError(
            f"stages: {text}: must be RATExSECONDS, such as 8x600 (row {row_id})"
        ) from None
    if not min(stage) > 0:
        raise NotSimulatedError(f"stages: {text}: rate and seconds must be > 0 (row {row_id})")
    if not 1 <= stage[0] * stage[1] <= MOST_REQUESTS:
        raise NotSimulatedError(
            f"stages: {text}: rate x seconds must be 1 to {MOST_REQUESTS:,} requests (row {row_id})"
        )
    return stage
