"""Rows of kind=silicon with mode=disagg: prefill workers and decode workers behind NVIDIA Dynamo.

The columns prefill_* and decode_* hold the layout of a worker of each side and the number of workers. A
number that is missing follows from the row's `gpus` and the other one; a row that does not tell both is not
simulated.
Without `concurrency`, the decode batch size of all ranks of all decode workers is the number of clients.
`experiments/score/disaggregated_recipes.py` has the settings that no column states.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pandas as pd

from experiments.score.disaggregated_recipes import side_recipe, with_published_layout
from experiments.score.engine_versions import engine_of
from experiments.score.layouts import given, layout_of
from experiments.score.silicon import GIVEN_SHARE, closed_loop, model_of
from experiments.study.measured_rows import check_context, whole
from experiments.study.presets import NotSimulatedError, base_scenario, load_generator
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.levels import LatencyLevel
from policies.batching.disaggregated import DecodeOnly, PrefillOnly
from sim.setup.pool import PoolSettings
from sim.setup.scenario import Scenario
from sim.transfer.kv_transfers import KvTransferSettings

SIDES = ("prefill", "decode")


def scenario_of(row: dict[str, Any], latency: LatencyLevel) -> Scenario:
    """Returns the scenario of a row. Raises NotSimulatedError, or ValueError for a layout that cannot be."""
    row = with_published_layout(row)
    prompt, output = whole(row, "isl"), whole(row, "osl")
    base = behind_dynamo(base_scenario(row["model"], row["gpu"], engine_in_dynamo(row)))
    check_context(prompt, output, base.model)
    layouts = {side: layout_of(row, base, f"{side}_").layout for side in SIDES}
    workers = workers_of(row, layouts)
    whole_base = replace(base, latency=latency, model=model_of(row, base))
    longest = min(base.model.max_position_embeddings, prompt + output + 256)
    sides = {
        side: with_layout(whole_base, layout, longest, row, role=side, replicas=workers[side])
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


def with_layout(
    base: Scenario,
    layout: ParallelLayout,
    max_model_len: int,
    row: dict[str, Any],
    *,
    role: str,
    replicas: int,
) -> PoolSettings:
    """Returns the pool of one side; the limits of an engine profile hold for each attention rank."""
    share, recipe = layout.attention_data_parallel_size, side_recipe(row, role)
    budget = recipe.max_num_batched_tokens or share * base.max_num_batched_tokens
    engine = replace(
        base.engine,
        kernels=replace(base.engine.kernels, moe_backend=recipe.moe_backend),
        gpu_memory_utilization=recipe.gpu_memory_utilization
        or base.engine.gpu_memory_utilization
        or GIVEN_SHARE,
        max_num_batched_tokens=budget,
        max_num_seqs=recipe.max_num_seqs or share * base.engine.max_num_seqs,
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
    """Returns the number of workers per side.

    Raises NotSimulatedError if the row does not tell them, or if its GPUs contradict them.
    """
    workers = {side: given(row, f"{side}_num_workers") for side in layouts}
    gpus = given(row, "gpus")
    devices = {side: layout.num_devices for side, layout in layouts.items()}
    missing = [f"{side}_num_workers" for side, count in workers.items() if count is None]
    if len(missing) == 2 or (missing and gpus is None):
        raise NotSimulatedError(
            f"{' and '.join(missing)}: missing, so that the number of workers is unknown and nothing is "
            "assumed; give both, or gpus and one of them"
        )
    for side, other in (SIDES, SIDES[::-1]):
        if workers[side] is None:
            assert gpus is not None
            workers[side] = max(0, gpus - (workers[other] or 0) * devices[other]) // devices[side]
    counts = {side: count or 0 for side, count in workers.items()}
    used = sum(counts[side] * devices[side] for side in layouts)
    if (gpus is not None and used != gpus) or not all(counts.values()):
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
