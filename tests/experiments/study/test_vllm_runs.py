"""Settings of measured runs of vLLM: every column is simulated, refused, or named as unused."""

import numpy as np
import pandas as pd
import pytest

from experiments.score import per_request
from experiments.study.presets import NotSimulatedError
from experiments.study.vllm_runs import unused, vllm_scenario
from hwmodels.levels import Spec

DENSE = {
    "run": "night",
    "gpu": "H100",
    "model": "HuggingFaceTB/SmolLM2-135M",
    "tp": 1,
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "num_gpu_blocks": np.nan,
    "gpu_memory_utilization": 0.8,
}
EXPERTS = {**DENSE, "model": "Qwen/Qwen3-30B-A3B-Instruct-2507"}


def scenario(row, **columns):
    return vllm_scenario({**row, **columns}, Spec(), None)


def test_the_limits_are_those_of_engine_and_policy():
    plain = scenario(DENSE, num_gpu_blocks=500.0, block_size=32)
    engine = plain.engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.num_kv_blocks) == (64, 2048, 500)
    assert plain.batching.max_num_batched_tokens == 2048
    assert (engine.gpu_memory_utilization, plain.caching.block_size) == (0.8, 32)


def test_data_parallel_copies_of_a_dense_model_are_replicas():
    two = scenario(DENSE, dp=2, pp=2, num_gpu_blocks=500)
    assert (two.replicas, two.pipeline_parallel_size, two.attention_data_parallel_size) == (2, 2, 1)
    assert type(two.routing).__name__ == "LeastOutstanding"
    assert (two.engine.max_num_seqs, two.engine.num_kv_blocks) == (64, 500)
    assert scenario(DENSE, dp=1).replicas == 1


def test_data_parallel_ranks_of_a_model_with_experts_share_these():
    """Each rank of vLLM has the limits of the table, the replica those of all ranks together."""
    two = scenario(EXPERTS, tp=2, dp=2, ep=4, num_gpu_blocks=500)
    assert (two.replicas, two.attention_data_parallel_size, two.expert_parallel_size) == (1, 2, 4)
    assert two.layout.num_devices == 4
    assert (two.engine.max_num_seqs, two.engine.num_kv_blocks) == (128, 1000)
    assert two.engine.max_num_batched_tokens == two.batching.max_num_batched_tokens == 4096
    assert scenario(EXPERTS, tp=2, dp=2, ep=1).layout.expert_tensor_parallel_size == 4


@pytest.mark.parametrize(
    ("columns", "setting", "value"),
    [
        ({"dtype": "float16"}, "model.dtype", "fp16"),
        ({"dtype": "auto"}, "model.dtype", "bf16"),
        ({"quantization": "awq"}, "model.weights", "int4_wo"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "model.kv_cache_dtype", "fp8"),
        ({"enable_chunked_prefill": False}, "batching.enable_chunked_prefill", False),
        ({"enforce_eager": True}, "engine.cuda_graphs.enabled", False),
        ({"enforce_eager": np.nan}, "engine.cuda_graphs.enabled", True),
        ({"model": "Qwen/Qwen3-8B-FP8"}, "model.weights", "fp8_block"),
    ],
)
def test_columns_become_settings(columns, setting, value):
    found = scenario(DENSE, **columns)
    for name in setting.split("."):
        found = getattr(found, name)
    assert found == value


def test_prefix_caching_may_be_off():
    assert type(scenario(DENSE).caching).__name__ == "PrefixCaching"
    assert type(scenario(DENSE, enable_prefix_caching=False, block_size=32).caching).__name__ == "Paged"


@pytest.mark.parametrize(
    ("row", "columns", "reason"),
    [
        (EXPERTS, {"dp": 2, "ep": 3}, "ep=3: must be 1, or tp x dp = 2, over which vLLM distributes"),
        (DENSE, {"ep": 2}, "ep=2: must be 1, because smollm2-135m has no experts"),
        (DENSE, {"dp": 0}, "dp=0: must be a whole number >= 1"),
        (DENSE, {"quantization": "squeezellm"}, "quantization=squeezellm: must be one of awq, auto_awq"),
        (DENSE, {"enforce_eager": "maybe"}, "enforce_eager=maybe: must be true or false"),
        (DENSE, {"dcp": 2}, "dcp=2: is not simulated; must be empty or 1"),
        (DENSE, {"num_speculative_tokens": 1}, "num_speculative_tokens=1: is not simulated"),
        (DENSE, {"gpu_memory_utilization": 1.5}, "engine.gpu_memory_utilization=1.5"),
    ],
)
def test_settings_that_cannot_be_simulated_get_a_reason(row, columns, reason):
    with pytest.raises((NotSimulatedError, ValueError)) as error:
        scenario(row, **columns)
    assert reason in str(error.value).replace("engine: ", "engine.")


def test_settings_without_effect_are_named():
    assert unused([*DENSE, "dp", "ep", "weather"]) == ["weather"]
    assert per_request.unused_settings(pd.DataFrame(columns=[*DENSE, "requests", "ttft_mean_ms", "x"])) == [
        "x"
    ]


def test_twice_the_gpus_answer_sooner():
    """Twice the copies halve the queue of a burst, and experts on two GPUs are read in half the time."""
    rows = [
        {"arrival_s": 0.0, "input_tokens": 1000, "output_tokens": 20, "id": i, "run": "night"}
        for i in range(40)
    ]
    for row, more in ((DENSE, {"dp": 2}), (EXPERTS, {"dp": 2, "ep": 2})):
        requests = {"requests": pd.DataFrame(rows), "max_model_len": np.nan}
        one = per_request.predict({**row, **requests}, Spec())
        two = per_request.predict({**row, **requests, **more}, Spec())
        assert two["e2e_mean_ms"] < 0.85 * one["e2e_mean_ms"]
