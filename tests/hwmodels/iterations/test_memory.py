"""The memory planner: the use of each byte, and the message if memory does not suffice."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.host import GIB, CudaGraphs
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.iterations.memory import (
    MemoryProfile,
    adapter_bytes,
    kv_split,
    plan_memory,
    redundant_bytes,
    weight_bytes,
)
from hwmodels.model import (
    Block,
    DenseMlp,
    GroupedQueryAttention,
    LinearAttention,
    MixtureOfExperts,
    ModelSpec,
    Role,
)
from hwmodels.model.weights import Lora
from hwmodels.speculation.draft import LayerDraft, ModelDraft


def tp(size, **given):
    return ParallelLayout(tensor_parallel_size=size, **given)


def make_model(*attentions, mlp=None):
    """Returns a model with one layer of each kind of attention.

    4 KV heads of 16 in bf16 take 256 bytes per token and layer.
    """
    mlp = mlp or DenseMlp(intermediate_size=160)
    return ModelSpec(
        name="tiny",
        hidden_size=64,
        vocab_size=1000,
        max_position_embeddings=4096,
        blocks=tuple(Block(count=1, attention=attention, mlp=mlp) for attention in attentions),
    )


def grouped(window=None):
    return GroupedQueryAttention(num_heads=8, num_kv_heads=4, head_dim=16, window=window)


def test_the_docstring_of_plan_memory_works_an_example(models, devices):
    """Llama-3.1-8B on an RTX 4090 at 0.92, 2,048 batched tokens and 256 sequences."""
    device = devices["rtx_4090"]
    plan = plan_memory(model=models["llama3_1_8b"], device=device, gpu_memory_utilization=0.92)
    total = device.memory_bytes * (1 - 0.0018) - 0.38 * GIB
    assert plan.usable_bytes == pytest.approx(0.92 * total)
    in_gib = [
        plan.usable_bytes,
        plan.weights_bytes,
        plan.activation_bytes,
        plan.cuda_graph_bytes,
        plan.runtime_bytes,
        plan.kv_bytes,
    ]
    assert [round(each / GIB, 2) for each in in_gib] == [21.68, 14.96, 0.47, 0.71, 0.25, 5.29]


def test_the_parts_fill_what_may_be_used_up_to_less_than_a_block(models, devices):
    plan = plan_memory(model=models["llama3_1_70b"], device=devices["h100_sxm"], layout=tp(4), block_size=32)
    rest = plan.usable_bytes - plan.fixed_bytes - plan.kv_bytes
    assert plan.usable_bytes < 0.9 * devices["h100_sxm"].memory_bytes
    assert 0 <= rest < 32 * plan.kv_bytes_per_token
    assert plan.kv_bytes == 32 * plan.num_blocks * plan.kv_bytes_per_token


def test_the_user_may_fix_the_number_of_blocks_of_all_memory(models, devices):
    plan = plan_memory(model=models["llama3_1_8b"], device=devices["h100_sxm"], num_kv_blocks=9)
    assert plan.usable_bytes == devices["h100_sxm"].memory_bytes


def test_graphs_take_memory_that_goes_to_kv_without_them(models, devices):
    asked = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"]}
    without = plan_memory(**asked, cuda_graphs=CudaGraphs(enabled=False))
    assert without.cuda_graph_bytes == 0
    assert without.num_blocks > plan_memory(**asked).num_blocks


def test_the_user_may_fix_the_number_of_blocks(models, devices):
    assert plan_memory(model=models["smollm2_135m"], device=devices["t4"], num_kv_blocks=7).num_blocks == 7


def test_the_user_may_fix_the_memory_of_kv(models, devices):
    """Llama-3.1-8B has 128 KiB of KV per token: 8 GiB are 65,536 tokens, 4,096 blocks of 16."""
    plan = plan_memory(model=models["llama3_1_8b"], device=devices["h100_sxm"], kv_cache_memory_bytes=8 * GIB)
    assert plan.num_blocks == 4096
    assert plan.usable_bytes == pytest.approx(plan.fixed_bytes + plan.kv_bytes)
    two = plan_memory(
        model=models["llama3_1_8b"], device=devices["h100_sxm"], layout=tp(2), kv_cache_memory_bytes=8 * GIB
    )
    assert two.num_blocks == 8192  # of each device


def test_windows_and_states_are_in_the_given_memory_of_kv(devices):
    """Two layers with 256 B of KV per token, one of them with a window of 16 tokens in each of two slots."""
    model = make_model(grouped(), grouped(window=16))
    given = 2 * 16 * 256 + 16 * 256 * 10.5
    plan = plan_memory(model=model, device=devices["h100_sxm"], kv_cache_memory_bytes=given, max_num_seqs=2)
    assert plan.window_and_state_bytes == 2 * 16 * 256
    assert plan.num_blocks == 10


def test_rejects_memory_for_kv_without_room_for_a_block(models, devices):
    with pytest.raises(
        ValueError, match="kv_cache_memory_bytes=1000: must hold a block of 16 tokens of llama"
    ):
        plan_memory(model=models["llama3_1_8b"], device=devices["h100_sxm"], kv_cache_memory_bytes=1000)


def test_rejects_more_memory_for_kv_than_the_device_has(models, devices):
    with pytest.raises(ValueError, match=r"llama-3.1-8b with 80.0 GiB of KV needs .* more than the 79.6 GiB"):
        plan_memory(model=models["llama3_1_8b"], device=devices["h100_sxm"], kv_cache_memory_bytes=80 * GIB)


def test_rejects_a_model_that_does_not_fit_with_the_gib_missing_and_the_ranks_that_do(models, devices):
    with pytest.raises(ValueError, match=r"llama-3\.1-70b needs") as error:
        plan_memory(model=models["llama3_1_70b"], device=devices["h100_sxm"])
    assert "more than the 71.2 GiB it may use; the smallest size that fits is 2" in str(error.value)
    assert plan_memory(model=models["llama3_1_70b"], device=devices["h100_sxm"], layout=tp(2)).num_blocks


def test_says_so_where_no_node_is_large_enough(models, devices):
    with pytest.raises(ValueError, match="no size up to 8 fits"):
        plan_memory(model=models["llama3_1_70b"], device=devices["t4"])


def test_rejects_more_blocks_than_the_device_holds(models, devices):
    with pytest.raises(
        ValueError, match=r"llama-3\.1-8b with 100000 KV blocks needs .* the smallest size that fits is 4"
    ):
        plan_memory(model=models["llama3_1_8b"], device=devices["h100_sxm"], num_kv_blocks=100_000)


def test_rejects_ranks_that_do_not_divide_the_heads(models, devices):
    with pytest.raises(ValueError, match="tensor_parallel_size=3: must divide"):
        plan_memory(model=models["llama3_1_8b"], device=devices["h100_sxm"], layout=tp(3))


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


@given(
    share=st.floats(0.5, 1),
    extra_gib=st.integers(0, 100),
    ranks=st.sampled_from([1, 2, 4]),
    name=st.sampled_from(["llama3_1_8b", "gemma3_27b", "gpt_oss_20b", "deepseek_v2_lite"]),
)
def test_more_memory_or_more_ranks_never_mean_fewer_blocks(models, devices, share, extra_gib, ranks, name):
    device = replace(devices["h200_sxm"], gpus_per_node=16)
    larger = replace(device, memory_bytes=device.memory_bytes + extra_gib * GIB)

    def num_blocks(device, ranks):
        return plan_memory(
            model=models[name], device=device, layout=tp(ranks), gpu_memory_utilization=share
        ).num_blocks

    assert num_blocks(larger, ranks) >= num_blocks(device, ranks)
    assert num_blocks(device, 2 * ranks) >= num_blocks(device, ranks)


# Layouts


def test_stages_share_weights_and_kv(models, devices):
    model, device = models["llama3_1_70b"], devices["h200_sxm"]
    stages = plan_memory(model=model, device=device, layout=ParallelLayout(pipeline_parallel_size=4))
    table = 128_256 * 8192 * 2
    layers = weight_bytes(model, tp(1)) - 2 * table
    assert stages.weights_bytes == layers / 4 + table, "the first stage has the embedding, the last the head"
    assert stages.kv_bytes_per_token == model.kv_bytes_per_token() / 4


def test_the_stage_with_the_most_layers_counts(models, devices):
    """DeepSeek-R1: 31 of 61 layers; 80 layers in 3 stages: 27. A tied table is on both ends all the same."""
    r1 = models["deepseek_r1"]
    halves = tp(8, pipeline_parallel_size=2)
    plan = plan_memory(model=r1, device=devices["h200_sxm"], layout=halves)
    assert plan.kv_bytes_per_token == pytest.approx(r1.kv_bytes_per_token(8) * 31 / 61)
    thirds = plan_memory(
        model=models["llama3_1_70b"], device=devices["h200_sxm"], layout=tp(1, pipeline_parallel_size=3)
    )
    assert thirds.kv_bytes_per_token == models["llama3_1_70b"].kv_bytes_per_token() * 27 / 80
    tied = replace(make_model(grouped(), grouped()), tie_word_embeddings=True)
    table = 1000 * 64 * 2
    assert weight_bytes(tied, tp(1, pipeline_parallel_size=2)) == (weight_bytes(tied, tp(1)) + table) / 2


def test_attention_groups_and_rings_have_blocks_of_their_own(models, devices):
    """Each of 4 groups holds other sequences, each of 2 devices of a ring another part of them."""
    model, device = models["llama3_1_8b"], devices["h100_sxm"]
    layout = ParallelLayout(attention_data_parallel_size=4, context_parallel_size=2)
    plan = plan_memory(model=model, device=device, layout=layout)
    assert (plan.num_pools, plan.num_blocks % 8) == (8, 0)
    rest = plan.usable_bytes - plan.fixed_bytes - plan.kv_bytes
    assert 0 <= rest < 16 * plan.kv_bytes_per_token
    alone = plan_memory(model=model, device=device)
    assert plan.num_blocks == pytest.approx(8 * alone.num_blocks, rel=0.05)


def test_expert_parallel_devices_hold_their_experts_only():
    """8 experts of 7,680 weights: 2 on each of 4 devices."""
    mlp = MixtureOfExperts(num_experts=8, top_k=2, intermediate_size=40)
    model = make_model(grouped(), mlp=mlp)
    layout = ParallelLayout(attention_data_parallel_size=4, expert_parallel_size=4)
    assert weight_bytes(model, tp(1)) - weight_bytes(model, layout) == 6 * 7680 * 2


# Adapters and drafts


def test_redundant_experts_by_hand(models):
    """DeepSeek-R1, 32 copies on 32 ranks: one expert of 3 x 7,168 x 2,048 weights in each of 58 layers."""
    model = models["deepseek_r1"]
    layout = ParallelLayout(attention_data_parallel_size=32, expert_parallel_size=32)
    weights = 58 * 3 * 7168 * 2048
    assert redundant_bytes(model, layout, 32) == pytest.approx(weights * model.bytes_per_weight(Role.routed))
    assert redundant_bytes(model, layout, 64) == pytest.approx(2 * redundant_bytes(model, layout, 32))
    assert (
        redundant_bytes(model, layout, 0) == redundant_bytes(models["llama3_1_8b"], ParallelLayout(), 8) == 0
    )


def test_adapters_by_hand():
    """Rank 4, 3 adapters: 4 (p k + n) weights: 64 x 256 (p = 3), 128 x 64, 64 x 320 (p = 2), 160 x 64."""
    model, lora = make_model(grouped(), grouped()), Lora(rank=4, num_active=3)
    both_sides = (3 * 64 + 256) + (128 + 64) + (2 * 64 + 320) + (160 + 64)
    assert adapter_bytes(model, tp(1), lora) == 3 * 4 * 2 * both_sides * 2
    cut = (3 * 64 + 128) + (64 + 64) + (2 * 64 + 160) + (80 + 64)
    assert adapter_bytes(model, tp(2), lora) == 3 * 4 * 2 * cut * 2
    assert adapter_bytes(model, tp(1, pipeline_parallel_size=2), lora) == 3 * 4 * both_sides * 2


def test_experts_and_routers_have_no_adapters():
    mlp = MixtureOfExperts(num_experts=8, top_k=2, intermediate_size=40)
    both_sides = (3 * 64 + 256) + (128 + 64)
    assert adapter_bytes(make_model(grouped(), mlp=mlp), tp(1), Lora(rank=4)) == 4 * both_sides * 2


def test_adapters_take_memory_from_kv(models, devices):
    """Llama-3.1-8B, rank 16: 80 MiB each; a block of 16 tokens takes 2 MiB."""
    asked = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"]}
    without, plan = plan_memory(**asked), plan_memory(**asked, lora=Lora(rank=16, num_active=10))
    assert plan.adapter_bytes == 800 * 2**20
    assert plan.fixed_bytes - without.fixed_bytes == plan.adapter_bytes
    assert without.num_blocks - plan.num_blocks == 400


def test_a_draft_takes_memory_and_kv_in_every_block(models, devices):
    """A layer of multi-token prediction has the KV of a layer: 33 layers of 8 heads of 128, K and V, bf16."""
    asked = {"model": models["llama3_1_8b"], "device": devices["h100_sxm"]}
    draft = LayerDraft(kind="eagle")
    without, plan = plan_memory(**asked), plan_memory(**asked, draft=draft)
    assert plan.draft_bytes == draft.weight_bytes(models["llama3_1_8b"], tp(1)) > 0
    assert plan.fixed_bytes - without.fixed_bytes == plan.draft_bytes
    assert plan.kv_bytes_per_token == 33 * 2 * 8 * 128 * 2
    left = plan.usable_bytes - plan.fixed_bytes
    assert plan.num_blocks == left // (16 * plan.kv_bytes_per_token) < without.num_blocks


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "llama3_1_8b",
            "and the model alone fits; choose a smaller draft; for tensor_parallel_size, the sma",
        ),
        ("llama2_70b", "and the model alone does not fit either; for tensor_parallel_size, no size up to 8"),
    ],
)
def test_a_draft_that_does_not_fit_is_named(models, devices, name, message):
    draft = ModelDraft(model=models[name])
    with pytest.raises(ValueError, match=rf"^speculation: {models[name].name} and its draft of .*{message}"):
        plan_memory(model=models[name], device=devices["rtx_4090"], draft=draft)


# Windows and states


def test_a_window_may_have_places_of_its_own_in_every_slot():
    """10 slots, a window of 8 tokens of 256 bytes; a context of 5 needs no more than 5."""
    model = make_model(grouped(), grouped(window=8))
    assert kv_split(model, 1, 10, 0) == (512, 0)
    assert kv_split(model, 1, 10, 4096) == (256, 10 * 8 * 256)
    assert kv_split(model, 1, 10, 5) == (256, 10 * 5 * 256)
    assert kv_split(model, 2, 10, 4096) == (128, 10 * 8 * 128)


def test_blocks_hold_the_window_where_every_layer_has_one():
    assert kv_split(make_model(grouped(window=8)), 1, 10, 4096) == (256, 0)


STATE_BYTES = 4 * 8 * 16 * 4 + 3 * 96 * 2
"""4 value heads of 8 x 16 in fp32, and 3 x 96 inputs of the convolution in bf16."""


def plan_with_states(devices, rule="vllm", **settings):
    linear = LinearAttention(num_key_heads=2, key_head_dim=8, num_value_heads=4, value_head_dim=16)
    asked = {"model": make_model(grouped(), linear), "device": devices["rtx_4090"], "max_num_seqs": 1000}
    return plan_memory(**asked | {"profile": MemoryProfile(rule=rule)} | settings)


def test_vllm_keeps_states_of_linear_attention_in_blocks(devices):
    """One sequence takes 2,624 bytes of states: a block of 16 tokens of 256 bytes."""
    plan = plan_with_states(devices)
    assert (plan.state_bytes_per_sequence, plan.state_blocks, plan.state_slots) == (STATE_BYTES, 1, None)
    assert plan.window_and_state_bytes == 0
    assert plan_with_states(devices, block_size=4).state_blocks == 3


def test_a_slot_each_has_states_where_blocks_cannot_hold_them(devices):
    plan = plan_with_states(devices, blocks_hold_states=False)
    assert plan.window_and_state_bytes == 1000 * STATE_BYTES
    assert (plan.state_blocks, plan.state_slots) == (0, None)


def test_sglang_gives_a_share_of_the_rest_to_states(devices):
    """0.9 bytes for states per byte of KV, whatever max_num_seqs is; three states for a running sequence."""
    plan = plan_with_states(devices, "sglang")
    rest = plan.usable_bytes - plan.fixed_bytes + plan.window_and_state_bytes
    assert plan.window_and_state_bytes == pytest.approx(rest * 0.9 / 1.9)
    assert plan.kv_bytes == pytest.approx(rest / 1.9, rel=1e-3)
    assert plan.state_slots == int(plan.window_and_state_bytes / (3 * STATE_BYTES))
    alone = plan_with_states(devices, "sglang", finds_prefixes=False)
    assert alone.window_and_state_bytes == 1000 * STATE_BYTES
    assert alone.state_slots == 1000


def test_windows_get_places_of_their_own_where_that_leaves_more_blocks(models, devices):
    """Gemma 3: 5 of 6 layers see 1,024 tokens. Few slots set little aside; thousands would set aside all."""
    asked = {"model": models["gemma3_27b"], "device": devices["h200_sxm"]}
    few = plan_memory(**asked, max_num_seqs=8)
    many = plan_memory(**asked, max_num_seqs=8192, gpu_memory_utilization=0.95)
    assert few.window_and_state_bytes > 0
    assert few.kv_bytes_per_token < many.kv_bytes_per_token == models["gemma3_27b"].kv_bytes_per_token()
    assert many.window_and_state_bytes == 0
