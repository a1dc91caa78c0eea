"""Rows of kind=silicon with mode=disagg: prefill workers and decode workers behind NVIDIA Dynamo.

The columns prefill_* and decode_* hold the layout of a worker of each side and the number of workers. What a
row leaves out is assumed:

    num_workers     so many that the sides have the row's `gpus`; without these, one prefill worker and five
                    decode workers, the medians of InferenceX's published configurations (nvidia-master.yaml,
                    2026-03) that have no attention data parallelism on the decode side
    concurrency     the decode batch size of all ranks of all decode workers
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from experiments.score.drafts import TOKENS_PER_PASS
from experiments.score.engine_versions import engine_of
from experiments.score.layouts import given, layout_of
from experiments.score.silicon import closed_loop, model_of
from experiments.study.measured_rows import check_context, whole
from experiments.study.presets import NotSimulatedError, base_scenario, load_generator
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.levels.rooflines import LatencyLevel
from hwmodels.levels.speculative import Speculative
from policies.batching.decode_only import DecodeOnly
from policies.batching.prefill_only import PrefillOnly
from sim.setup.pool import PoolSettings
from sim.setup.scenario import Scenario
from sim.transfer.kv_transfers import KvTransferSettings

USUAL_WORKERS = {"prefill": 1, "decode": 5}
"""Numbers of workers that are assumed for a row without any."""

DRAFTS = 3
"""Tokens that are drafted with multi-token prediction, in most published configurations of small batches."""


def scenario_of(row: dict[str, Any], latency: LatencyLevel) -> Scenario:
    """Returns the scenario of a row. Raises NotSimulatedError, or ValueError for a layout that cannot be."""
    prompt, output = whole(row, "isl"), whole(row, "osl")
    base = behind_dynamo(base_scenario(row["model"], row["gpu"], engine_in_dynamo(row)))
    check_context(prompt, output, base.model)
    layouts = {side: layout_of(row, base, f"{side}_").layout for side in USUAL_WORKERS}
    workers = workers_of(row, layouts)
    whole_base = replace(base, latency=with_published_drafts(latency, row), model=model_of(row, base))
    longest = min(base.model.max_position_embeddings, prompt + output + 256)
    sides = {
        side: with_layout(whole_base, layout, longest, role=side, replicas=workers[side])
        for side, layout in layouts.items()
    }
    clients = clients_of(row, layouts["decode"], workers["decode"])
    return replace(
        whole_base,
        **settings_of(layouts["decode"]),
        pools=sides,
        # The decode worker answers the client, once it has the KV and a free slot.
        kv_transfer=KvTransferSettings(first_token_at="decode"),  # nosec B106 (no password)
        workload=closed_loop(row, clients),
    )


def engine_in_dynamo(row: dict[str, Any]) -> str:
    """Returns the engine profile; versions 0.x under trtllm are those of Dynamo's runtime.

    The engine in it is then the release of the day of the measurement.
    """
    is_runtime = row["backend"] == "trtllm" and str(row.get("backend_version")).startswith("0.")
    return engine_of({**row, "backend_version": None} if is_runtime else row)


def behind_dynamo(base: Scenario) -> Scenario:
    """Returns the engine's scenario behind Dynamo, or with InferenceMAX's client if that adds more."""
    clients = [load_generator(name) for name in ("dynamo", "inferencex")]
    return replace(base, client=max(clients, key=lambda client: client.added_s(base.engine.family)))


def with_published_drafts(latency: LatencyLevel, row: dict[str, Any]) -> LatencyLevel:
    """Returns the level of iteration times with the drafts of DeepSeek-R1's multi-token prediction.

    InferenceMAX's rows of TensorRT-LLM without numbers of workers are nearly all of configurations with
    `spec-decoding: mtp` (nvidia-master.yaml, 2026-03), those with numbers of configurations without.
    """
    is_published = row.get("source") == "inferencemax" and row["model"] == "deepseek-r1"
    has_workers = any(given(row, f"{side}_num_workers") for side in USUAL_WORKERS)
    if not is_published or row["backend"] != "trtllm" or has_workers:
        return latency
    accepted = TOKENS_PER_PASS["deepseek-r1"][DRAFTS]
    return Speculative(base=latency, num_draft_tokens=DRAFTS, accepted_tokens=accepted)


def with_layout(
    base: Scenario, layout: ParallelLayout, max_model_len: int, *, role: str, replicas: int
) -> PoolSettings:
    """Returns the pool of one side; the limits of an engine hold for each attention rank."""
    share = layout.attention_data_parallel_size
    budget = share * base.max_num_batched_tokens
    engine = replace(
        base.engine,
        max_num_batched_tokens=budget,
        max_num_seqs=share * base.engine.max_num_seqs,
        max_model_len=max_model_len,
    )
    batching = PrefillOnly if role == "prefill" else DecodeOnly
    return PoolSettings(
        model=base.model,
        hardware=base.hardware,
        engine=engine,
        batching=batching(max_num_batched_tokens=budget),
        scheduling=base.scheduling,
        caching=base.caching,
        calibration=base.calibration,
        latency=base.latency,
        role=role,
        replicas=replicas,
        **settings_of(layout),
    )


def settings_of(layout: ParallelLayout) -> dict[str, Any]:
    """Returns the sizes of a layout as settings of a replica."""
    return {
        "tensor_parallel_size": layout.tensor_parallel_size,
        "pipeline_parallel_size": layout.pipeline_parallel_size,
        "attention_data_parallel_size": layout.attention_data_parallel_size,
        "expert_parallel_size": layout.expert_parallel_size,
    }


def workers_of(row: dict[str, Any], layouts: dict[str, ParallelLayout]) -> dict[str, int]:
    """Returns the number of workers per side. Raises NotSimulatedError if the row's GPUs contradict it."""
    workers = {side: given(row, f"{side}_num_workers") for side in layouts}
    gpus = given(row, "gpus")
    devices = {side: layout.num_devices for side, layout in layouts.items()}
    if gpus is None:
        return {side: count or USUAL_WORKERS[side] for side, count in workers.items()}
    if workers["prefill"] is None and workers["decode"] is None:
        workers["prefill"] = USUAL_WORKERS["prefill"]
    for side, other in (("prefill", "decode"), ("decode", "prefill")):
        if workers[side] is None:
            workers[side] = max(0, gpus - (workers[other] or 0) * devices[other]) // devices[side]
    counts = {side: count or 0 for side, count in workers.items()}
    used = sum(counts[side] * devices[side] for side in layouts)
    if used != gpus or not all(counts.values()):
        raise NotSimulatedError(
            f"gpus={gpus}: must be those of {counts['prefill']} x {devices['prefill']} for prefill and "
            f"{counts['decode']} x {devices['decode']} for decode"
        )
    return counts


def clients_of(row: dict[str, Any], decode: ParallelLayout, workers: int) -> int:
    """Returns the requests in flight. Raises NotSimulatedError if no column tells them."""
    if not pd.isna(row["concurrency"]):
        return whole(row, "concurrency")
    batch = given(row, "decode_batch_size")
    if batch is None:
        raise NotSimulatedError("concurrency and decode_batch_size are missing: one of them must be given")
    return batch * decode.attention_data_parallel_size * workers
