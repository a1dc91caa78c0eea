"""Settings with which benchmarks started engines, where they differ from the engine profile's.

No column of the silicon table states them. InferenceMAX publishes the scripts that start its servers
(github.com/SemiAnalysisAI/InferenceX, Apache-2.0; `benchmarks/` as of the day of a run). For TensorRT-LLM:

- Llama 70B: max_num_tokens 16,384. With 1,024 prompt and 1,024 output tokens on fewer than 8 GPUs prompts
  wait for others: batch_wait_timeout_iters 20, batch_wait_max_tokens_ratio 0.9.
- DeepSeek-R1: max_num_tokens is the sum of clients, prompt length and 64, rounded up to a multiple of 64;
  since 2026-01-29 at least 8,192. Since then batches wait (40 iterations, ratio 0.8) in FP8 on B200 with
  1,024 and 1,024 tokens and 64 clients or more.
- gpt-oss: max_num_tokens 20,000.
- Attention data parallelism: enable_balance, prompts wait for one on each rank, at most 60 iterations
  (gpt-oss: 50, the default).

For SGLang and mixtures of experts, also where NVIDIA's lab repeated a run:

- chunked-prefill-size and max-prefill-tokens are 32,768, of checkpoints in nvfp4 16,384.
- On B200 scheduler-recv-interval is 30, and 10 with fewer than 16 clients. It counts passes, of which one may
  give several tokens; see `drafts`. moe-runner-backend is flashinfer_trtllm there, and auto elsewhere.

For vLLM they set async_scheduling before it became the default, and max-num-batched-tokens 8,192. On B200,
Llama 70B ran with CUDA graphs of whole decode iterations only (cudagraph_mode FULL_DECODE_ONLY, no
splitting_ops) and fused all-reduces: Python launches an iteration with a prompt, operator by operator. The
time per kernel, 55 us, was set on these rows. gpt-oss on Hopper ran with VLLM_MXFP4_USE_MARLIN.

The budget of the lab runs of vLLM is not published; the measured TTFT shows 2,048. All clients state
max_tokens, so that TensorRT-LLM can run its default capacity scheduler, guaranteed_no_evict.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pandas as pd

from experiments.score.drafts import tokens_per_pass

SGLANG_MODELS = ("deepseek-r1", "qwen3.5-397b-a17b")
"""Models whose scripts for SGLang were read."""


class Recipe(NamedTuple):
    """Settings of the engine and of its batching policy; the defaults change nothing."""

    max_num_batched_tokens: int | None = None
    """Token budget of an iteration, per rank of attention data parallelism; None: the profile's."""
    batch_wait_timeout_iters: int = 0
    batch_wait_max_tokens_ratio: float = 0.0
    capacity_scheduler_policy: str | None = None
    scheduler_recv_interval: int = 1
    asynchronous: bool = False
    """Whether a version without asynchronous scheduling by default was told to use it."""
    batch_wait_min_prompts: int = 0
    max_prefill_tokens: int | None = None
    moe_backend: str | None = None
    """Kernels of the routed experts; None: the profile's."""
    launch_s: float | None = None
    """CPU seconds to launch a kernel outside CUDA graphs; None: the profile's."""

    def batching(self) -> dict[str, Any]:
        """Returns the settings of the batching policy, its budget excepted."""
        names = (
            "batch_wait_timeout_iters",
            "batch_wait_max_tokens_ratio",
            "batch_wait_min_prompts",
            "max_prefill_tokens",
            "capacity_scheduler_policy",
        )
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value}


def recipe_of(row: dict[str, Any]) -> Recipe:
    """Returns the settings of the row's benchmark."""
    published = row.get("source") == "inferencemax"
    if row["backend"] == "trtllm":
        recipe = balanced(trtllm_recipe(row), row) if published else Recipe()
        return recipe._replace(capacity_scheduler_policy="guaranteed_no_evict")
    if row["backend"] == "sglang" and row["model"] in SGLANG_MODELS:
        return sglang_recipe(row)
    if row["backend"] != "vllm":
        return Recipe()
    if not published:
        return Recipe(2048) if row.get("source") == "nvidia-lab" else Recipe()
    by_python = str(row["model"]).startswith("llama") and row["gpu"] == "b200_sxm"
    on_hopper = str(row["model"]).startswith("gpt-oss") and row["gpu"] in ("h100_sxm", "h200_sxm")
    moe_backend = "marlin" if on_hopper else None
    launch_s = 55e-6 if by_python else None
    return Recipe(8192, asynchronous=True, moe_backend=moe_backend, launch_s=launch_s)


def trtllm_recipe(row: dict[str, Any]) -> Recipe:
    """Returns the settings of InferenceMAX's servers of TensorRT-LLM."""
    model, short = str(row["model"]), row["isl"] == row["osl"] == 1024
    if model.startswith("llama"):
        return Recipe(16_384, 20, 0.9) if short and row["tp_size"] < 8 else Recipe(16_384)
    if model.startswith("gpt-oss"):
        return Recipe(20_000)
    if model.startswith("deepseek"):
        return deepseek_recipe(row, short)
    return Recipe()


def balanced(recipe: Recipe, row: dict[str, Any]) -> Recipe:
    """Returns the settings with those of attention data parallelism: prompts wait for one on each rank.

    A request goes to the rank with the fewest, that on which one has ended. Which one that is, is random, so
    that n ranks all have a prompt after n (1 + 1/2 + ... + 1/n) prompts on average (coupon collector).
    """
    ranks = int(row["attention_dp_size"])
    if ranks == 1:
        return recipe
    prompts = round(ranks * sum(1 / n for n in range(1, ranks + 1)))
    passes = 50 if str(row["model"]).startswith("gpt-oss") else 60
    timeout = round(passes * tokens_per_pass(row))
    return recipe._replace(
        batch_wait_timeout_iters=timeout, batch_wait_max_tokens_ratio=0.0, batch_wait_min_prompts=prompts
    )


def sglang_recipe(row: dict[str, Any]) -> Recipe:
    """Returns the settings of a mixture of experts on SGLang."""
    budget = 16_384 if row["weights"] == "nvfp4" else 32_768
    if row["gpu"] != "b200_sxm":
        return Recipe(budget, max_prefill_tokens=budget)
    passes = 30 if row["concurrency"] >= 16 else 10
    interval = round(passes * tokens_per_pass(row))
    return Recipe(budget, scheduler_recv_interval=interval, max_prefill_tokens=budget, moe_backend="auto")


def deepseek_recipe(row: dict[str, Any], short: bool) -> Recipe:
    """Returns the settings of DeepSeek-R1; short: prompts and outputs of 1,024 tokens."""
    budget = -(-int(row["concurrency"] + row["isl"] + 64) // 64) * 64
    day = row.get("measured_date")
    if pd.isna(day) or str(day) < "2026-01-29":
        return Recipe(budget)
    waits = short and row["gpu"] == "b200_sxm" and row["weights"] == "fp8" and row["concurrency"] >= 64
    return Recipe(max(budget, 8192), 40, 0.8) if waits else Recipe(max(budget, 8192))
