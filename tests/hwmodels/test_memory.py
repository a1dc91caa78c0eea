"""The memory planner: where the bytes go, and what it says when they do not suffice."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.host import CudaGraphs
from hwmodels.memory import GIB, activation_bytes, plan_memory


def test_llama_3_1_8b_on_an_rtx_4090_gets_the_blocks_that_vllm_found(models, devices):
    """vLLM 0.19, bf16, gpu_memory_utilization 0.9, 2,048 batched tokens, 256 sequences: 2,588 blocks."""
    plan = plan_memory(model=models["llama3_1_8b"], device=devices["rtx_4090"])
    assert plan.num_blocks == 2602
    assert plan.num_blocks == pytest.approx(2588, rel=0.01)


def test_the_parts_fill_what_may_be_used_up_to_less_than_a_block(models, devices):
    plan = plan_memory(
        model=models["llama3_1_70b"], device=devices["h100_sxm"], tensor_parallel_size=4, block_size=32
    )
    rest = plan.usable_bytes - plan.fixed_bytes - plan.kv_bytes
    assert plan.usable_bytes == pytest.approx(0.9 * devices["h100_sxm"].memory_bytes)
    assert 0 <= rest < 32 * plan.kv_bytes_per_token
    assert plan.kv_bytes == 32 * plan.num_blocks * plan.kv_bytes_per_token


def test_activations_by_hand(models):
    """In the MLP 4,096 tokens x (2 x 4,096 + 3 x 14,336) x 2 bytes; after it 64 rows x 128,256 x 18 bytes."""
    model = models["llama3_1_8b"]
    assert activation_bytes(model, 1, 4096, 64) == 4096 * 51_200 * 2
    assert activation_bytes(model, 1, 16, 64) == 64 * 128_256 * 18


def test_graphs_take_memory_that_goes_to_kv_without_them(models, devices):
    asked = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"]}
    without = plan_memory(**asked, cuda_graphs=CudaGraphs(enabled=False))
    assert without.cuda_graph_bytes == 0
    assert without.num_blocks > plan_memory(**asked).num_blocks


def test_the_user_may_fix_the_number_of_blocks(models, devices):
    assert plan_memory(model=models["smollm2_135m"], device=devices["t4"], num_kv_blocks=7).num_blocks == 7


def test_rejects_a_model_that_does_not_fit_with_the_gib_missing_and_the_ranks_that_do(models, devices):
    with pytest.raises(ValueError, match=r"llama-3\.1-70b needs") as error:
        plan_memory(model=models["llama3_1_70b"], device=devices["h100_sxm"])
    assert "61.3 GiB more than the 71.7 GiB it may use; smallest that fits: 2" in str(error.value)
    assert plan_memory(
        model=models["llama3_1_70b"], device=devices["h100_sxm"], tensor_parallel_size=2
    ).num_blocks


def test_says_so_where_no_node_is_large_enough(models, devices):
    with pytest.raises(ValueError, match="none up to 8 fits"):
        plan_memory(model=models["llama3_1_70b"], device=devices["t4"])


def test_rejects_more_blocks_than_the_device_holds(models, devices):
    with pytest.raises(
        ValueError, match=r"llama-3\.1-8b with 100000 KV blocks needs .* smallest that fits: 4"
    ):
        plan_memory(model=models["llama3_1_8b"], device=devices["h100_sxm"], num_kv_blocks=100_000)


def test_rejects_ranks_that_do_not_divide_the_heads(models, devices):
    with pytest.raises(ValueError, match="tensor_parallel_size=3: must divide"):
        plan_memory(model=models["llama3_1_8b"], device=devices["h100_sxm"], tensor_parallel_size=3)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization=1.2: must be a share"),
        ({"block_size": 0}, "block_size=0: must be a whole number >= 1"),
        ({"num_kv_blocks": 0}, "num_kv_blocks=0: must be a whole number >= 1"),
    ],
)
def test_rejects_impossible_settings(models, devices, given, message):
    with pytest.raises(ValueError, match=message):
        plan_memory(model=models["llama3_1_8b"], device=devices["h100_sxm"], **given)


@given(share=st.floats(0.5, 1), extra_gib=st.integers(0, 100), ranks=st.sampled_from([1, 2, 4]))
def test_more_memory_or_more_ranks_never_mean_fewer_blocks(models, devices, share, extra_gib, ranks):
    device, model = devices["h100_sxm"], models["llama3_1_8b"]
    larger = replace(device, memory_bytes=device.memory_bytes + extra_gib * GIB)

    def num_blocks(device, ranks):
        return plan_memory(
            model=model, device=device, tensor_parallel_size=ranks, gpu_memory_utilization=share
        ).num_blocks

    assert num_blocks(larger, ranks) >= num_blocks(device, ranks)
    assert num_blocks(device, 2 * ranks) >= num_blocks(device, ranks)
