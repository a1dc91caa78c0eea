"""Settings of published benchmarks, and their way into the scenario of a row."""

import pytest

from experiments.score.recipes import Recipe, recipe_of
from experiments.score.silicon import client_of, scenario_of
from experiments.study.presets import load_generator
from hwmodels.levels import Spec

ROW = {
    "source": "inferencemax",
    "backend": "trtllm",
    "backend_version": None,
    "model": "llama-3.1-70b",
    "gpu": "h200_sxm",
    "weights": "fp8",
    "moe_weights": None,
    "mode": "agg",
    "isl": 1024,
    "osl": 1024,
    "concurrency": 8,
    "tp_size": 4,
    "pp_size": 1,
    "attention_dp_size": 1,
    "moe_tp_size": 1,
    "moe_ep_size": 1,
    "gpus": 4,
    "measured_date": "2025-10-29",
}


NO_EVICT = "guaranteed_no_evict"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, Recipe(16_384, 20, 0.9, NO_EVICT)),
        ({"tp_size": 8}, Recipe(16_384, 0, 0.0, NO_EVICT)),
        ({"osl": 8192}, Recipe(16_384, 0, 0.0, NO_EVICT)),
        ({"source": "nvidia-lab"}, Recipe(None, 0, 0.0, NO_EVICT)),
        ({"source": "nvidia-lab", "backend": "vllm"}, Recipe(2048)),
        ({"backend": "vllm"}, Recipe(8192, asynchronous=True)),
        ({"backend": "vllm", "gpu": "b200_sxm"}, Recipe(8192, asynchronous=True, launch_s=55e-6)),
        ({"backend": "sglang"}, Recipe()),
        ({"model": "gpt-oss-120b"}, Recipe(20_000, 0, 0.0, NO_EVICT)),
        ({"model": "qwen3.5-397b-a17b"}, Recipe(None, 0, 0.0, NO_EVICT)),
        ({"model": "deepseek-r1"}, Recipe(1152, 0, 0.0, NO_EVICT)),
        (
            {"model": "deepseek-r1", "isl": 8192, "measured_date": "2026-02-03"},
            Recipe(8320, 0, 0.0, NO_EVICT),
        ),
        ({"model": "deepseek-r1", "measured_date": "2026-02-03"}, Recipe(8192, 0, 0.0, NO_EVICT)),
    ],
)
def test_recipes_are_those_of_the_published_scripts(changes, expected):
    """DeepSeek-R1: 8 clients + 1,024 + 64 = 1,096, rounded up to a multiple of 64: 1,152."""
    assert recipe_of({**ROW, **changes}) == expected


def test_deepseek_in_fp8_on_b200_waits_from_64_clients_on():
    row = {**ROW, "model": "deepseek-r1", "gpu": "b200_sxm", "measured_date": "2026-02-05"}
    assert recipe_of({**row, "concurrency": 64}) == Recipe(8192, 40, 0.8, NO_EVICT)
    assert recipe_of({**row, "concurrency": 32}).batch_wait_timeout_iters == 0
    assert recipe_of({**row, "concurrency": 64, "weights": "nvfp4"}).batch_wait_timeout_iters == 0


def test_a_recipe_reaches_the_engine_and_its_policy():
    scenario = scenario_of(ROW, Spec())
    batching = scenario.batching
    assert scenario.engine.max_num_batched_tokens == batching.max_num_batched_tokens == 16_384
    assert (batching.batch_wait_timeout_iters, batching.batch_wait_max_tokens_ratio) == (20, 0.9)
    assert batching.capacity_scheduler_policy == NO_EVICT
    assert scenario.workload.max_tokens == "exact", "clients state how many tokens they want"


def test_a_recipe_may_set_the_launch_time():
    row = {**ROW, "backend": "vllm", "gpu": "b200_sxm"}
    assert scenario_of(row, Spec()).engine.host.launch_s == 55e-6
    assert scenario_of({**row, "gpu": "h200_sxm"}, Spec()).engine.host.launch_s < 55e-6


def test_with_attention_data_parallelism_prompts_wait_for_one_on_each_rank():
    """8 ranks: 8 (1 + 1/2 + ... + 1/8) = 21.7 prompts; an image with drafts gives 1.79 tokens per pass."""
    row = {**ROW, "model": "deepseek-r1", "gpu": "b200_sxm", "attention_dp_size": 8, "tp_size": 1, "gpus": 8}
    recipe = recipe_of(row)
    assert (recipe.batch_wait_timeout_iters, recipe.batch_wait_min_prompts) == (60, 22)
    assert recipe_of({**row, "backend_version": "1.2.0rc6.post3"}).batch_wait_timeout_iters == 107
    assert recipe_of({**row, "model": "gpt-oss-120b"}).batch_wait_timeout_iters == 50


def test_gpt_oss_ran_with_marlin_on_hopper():
    row = {**ROW, "backend": "vllm", "model": "gpt-oss-120b"}
    assert recipe_of(row).moe_backend == "marlin"
    assert recipe_of({**row, "gpu": "b200_sxm"}).moe_backend is None


def test_sglang_ran_the_kernels_of_tensorrt_llm_on_b200_and_its_own_choice_on_h200():
    row = {**ROW, "backend": "sglang", "model": "deepseek-r1", "weights": "fp8"}
    assert recipe_of({**row, "gpu": "b200_sxm"}).moe_backend == "auto"
    assert recipe_of({**row, "gpu": "h200_sxm"}).moe_backend is None


@pytest.mark.parametrize(
    ("source", "backend", "model", "version", "client"),
    [
        ("inferencemax", "sglang", "deepseek-r1", "0.5.9", "inferencex"),
        ("inferencemax", "vllm", "llama-3.1-70b", "0.15.1", "inferencex"),
        ("nvidia-lab", "sglang", "qwen3.5-397b-a17b", "0.5.9", "inferencex"),  # repeats runs of InferenceMAX
        ("nvidia-lab", "sglang", "qwen3-32b", "0.5.1.post1", "dynamo"),
        ("nvidia-lab", "trtllm", "qwen3-32b", "1.0.0", "dynamo"),
        ("nvidia-lab", "trtllm", "qwen3-32b", "1.2.0", "none"),
        ("nvidia-lab", "vllm", "qwen3-32b", "0.12.0", "none"),
        ("mine", "vllm", "qwen3-32b", "0.15.0", "none"),
    ],
)
def test_rows_are_measured_by_the_load_generator_of_their_source(source, backend, model, version, client):
    row = {**ROW, "source": source, "backend": backend, "model": model, "backend_version": version}
    assert client_of(row) == client
    assert load_generator(client).name == client
