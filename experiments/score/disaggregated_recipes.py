"""Settings of InferenceX's prefill and decode workers behind NVIDIA Dynamo that no column states.

From the published recipes for DeepSeek-R1 (github.com/ishandhanani/srt-slurm, github.com/NVIDIA/srt-slurm and
github.com/SemiAnalysisAI/InferenceX, configs/nvidia-master.yaml, Apache-2.0; 2026-02 and 2026-03):

- SGLang: memory fraction 0.85. Chunks of 32,768 tokens, of all attention ranks together; with seven prefill
  workers 65,536. With data parallel attention in fp8 on B200 131,072 and 16 requests at once, since March
  65,536 and 8. A prompt keeps its place until its KV has been sent, so that a rank with few places is idle
  meanwhile.
- TensorRT-LLM: largest batches of the decode workers, which the names of the recipes state. In fp8 on B200,
  experts of workers with data parallel attention run DeepGEMM.

TensorRT-LLM's rows in fp8 of February 2026 state wrong prefill layouts: the same runs have the same times in
March under other labels, which are those of the recipes. `with_published_layout` returns the row with them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from experiments.score.layouts import given

FROM_MARCH = "2026-03-01"


class SideRecipe(NamedTuple):
    """Settings of a worker, all attention ranks together; None: the engine profile's."""

    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    gpu_memory_utilization: float | None = None
    moe_backend: str = "auto"


DECODE_BATCHES = {
    ("b200_sxm", "nvfp4", 1024, 5): 32,
    ("b200_sxm", "nvfp4", 1024, 6): 64,
    ("b200_sxm", "fp8", 8192, 4): 32,
    ("b200_sxm", "fp8", 8192, 6): 16,
}
"""Largest batch of a tensor-parallel decode worker by GPU, weights, prompt tokens and number of workers."""


def side_recipe(row: dict[str, Any], side: str) -> SideRecipe:
    """Returns the settings of the prefill or the decode workers of a row."""
    if row.get("source") != "inferencemax" or row["model"] != "deepseek-r1":
        return SideRecipe()
    ranks = given(row, f"{side}_attention_dp_size") or 1
    if row["backend"] == "sglang":
        return sglang_recipe(row, side, ranks)
    if ranks > 1 and row["weights"] == "fp8" and row["gpu"] == "b200_sxm":
        return SideRecipe(moe_backend="deepgemm")
    if side == "decode" and ranks == 1:
        workers = given(row, "decode_num_workers") or 0
        batch = DECODE_BATCHES.get((row["gpu"], row["weights"], int(row["isl"]), workers))
        return SideRecipe(max_num_seqs=batch)
    return SideRecipe()


def sglang_recipe(row: dict[str, Any], side: str, ranks: int) -> SideRecipe:
    """Returns the settings of a worker of SGLang with so many attention ranks."""
    fraction = 0.85
    if side == "prefill" and ranks > 1 and row["weights"] == "fp8" and row["gpu"] == "b200_sxm":
        since_march = str(row.get("measured_date")) >= FROM_MARCH
        return SideRecipe(65_536, 8, fraction) if since_march else SideRecipe(131_072, 16, fraction)
    many = (given(row, "prefill_num_workers") or 0) >= 7
    return SideRecipe(65_536 if many else 32_768, None, fraction)


def with_published_layout(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row with the prefill layout of its recipe, where its own label was wrong."""
    wrong = row.get("source") == "inferencemax" and row["backend"] == "trtllm" and row["weights"] == "fp8"
    if not wrong or row["model"] != "deepseek-r1" or str(row.get("measured_date")) >= FROM_MARCH:
        return row
    on_hopper, short = row["gpu"] == "h200_sxm", int(row["isl"]) == 1024
    ranks = 8 if (short if on_hopper else row["concurrency"] > 1) else 1
    experts = 8 if on_hopper else 1
    sizes = {"tp": 8 // ranks, "attention_dp": ranks, "moe_tp": 8 // experts, "moe_ep": experts}
    return {**row, **{f"prefill_{name}_size": size for name, size in sizes.items()}}
