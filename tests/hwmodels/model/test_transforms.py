"""What pruning, sparsity and distillation change in bytes and FLOPs."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.model.model_spec import (
    Block,
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LinearAttention,
    MixtureOfExperts,
    ModelSpec,
)
from hwmodels.model.transforms import (
    distill,
    prune_layers,
    prune_width,
    shared_out,
    sparsify_2_4,
    sparsify_unstructured,
)

SHAPE = {"hidden_size": 256, "vocab_size": 1000, "max_position_embeddings": 64}


def make_model(*blocks, **given):
    return ModelSpec(**{"name": "tiny", **SHAPE, "blocks": blocks or (layers(),), **given})


def layers(count=4, attention=None, mlp=None):
    return Block(
        count=count,
        attention=attention or GroupedQueryAttention(num_heads=8, num_kv_heads=4, head_dim=32),
        mlp=mlp or DenseMlp(intermediate_size=512),
    )


LAYER = 2 * 256 * 256 + 2 * 256 * 128 + 3 * 256 * 512
"""Weights of the matrices of one of `layers`."""


def test_half_the_layers_are_half_of_their_weights_kv_and_flops():
    pruned, change = prune_layers(make_model(), 2)
    assert pruned.num_layers == 2
    assert change.before.num_parameters - change.after.num_parameters == 2 * (LAYER + 2 * 256)
    assert change.before.flops_per_token - change.after.flops_per_token == 2 * 2 * LAYER
    assert change.after.kv_bytes_per_token == change.before.kv_bytes_per_token / 2
    assert change.after.weight_bytes == 2 * pruned.num_parameters == change.after.checkpoint_bytes
    assert "training" in change.remarks[0]


def test_kinds_of_layers_are_pruned_alike_and_may_vanish():
    window = GroupedQueryAttention(num_heads=8, num_kv_heads=4, head_dim=32, window=16)
    model = make_model(layers(10, window), layers(2))
    assert [block.count for block in prune_layers(model, 6)[0].blocks] == [5, 1]
    assert [block.count for block in prune_layers(model, 1)[0].blocks] == [1]


@given(counts=st.lists(st.integers(1, 100), min_size=1, max_size=5), data=st.data())
def test_shares_add_up_and_are_off_by_less_than_one(counts, data):
    total = data.draw(st.integers(1, sum(counts)))
    shares = shared_out(total, counts)
    assert sum(shares) == total
    for share, count in zip(shares, counts, strict=True):
        assert abs(share - total * count / sum(counts)) < 1
        assert share <= count


@pytest.mark.parametrize("keep", [0, 5, 2.5])
def test_rejects_more_layers_than_there_are_or_none(keep):
    with pytest.raises(ValueError, match=f"keep_layers={keep}: "):
        prune_layers(make_model(), keep)


def test_width_by_hand():
    """Hidden 128, MLP 256, 4 heads over 2 KV heads of 32."""
    pruned, change = prune_width(make_model(), hidden_share=0.5, intermediate_share=0.5, heads_share=0.5)
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256
    assert change.after.num_parameters == 4 * (layer + 2 * 128) + 2 * 1000 * 128 + 128
    assert change.after.kv_bytes_per_token == change.before.kv_bytes_per_token / 2
    assert change.what == "width pruned to hidden_share 0.5, intermediate_share 0.5, heads_share 0.5"
    assert pruned.hidden_size == 128


def test_pruned_widths_are_multiples_of_64_and_never_larger():
    pruned = prune_width(make_model(hidden_size=200), hidden_share=0.6, intermediate_share=0.01)[0]
    assert (pruned.hidden_size, pruned.blocks[0].mlp.intermediate_size) == (128, 64)
    assert prune_width(make_model(hidden_size=40), hidden_share=0.5)[0].hidden_size == 40


def test_every_kind_of_attention_loses_heads_in_whole_groups():
    latent = LatentAttention(
        num_heads=8, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
    )
    linear = LinearAttention(num_key_heads=4, key_head_dim=32, num_value_heads=8, value_head_dim=32)
    experts = MixtureOfExperts(num_experts=4, top_k=2, intermediate_size=256, shared_intermediate_size=128)
    model = make_model(layers(), layers(1, latent, experts), layers(1, linear))
    pruned = prune_width(model, heads_share=0.5, intermediate_share=0.5)[0]
    grouped, latent, linear = (block.attention for block in pruned.blocks)
    assert (grouped.num_heads, grouped.num_kv_heads) == (4, 2)
    assert latent.num_heads == 4
    assert (linear.num_key_heads, linear.num_value_heads) == (2, 4)
    mlp = pruned.blocks[1].mlp
    assert (mlp.num_experts, mlp.intermediate_size, mlp.shared_intermediate_size) == (4, 128, 64)


@given(
    hidden=st.floats(0.05, 1),
    intermediate=st.floats(0.05, 1),
    heads=st.floats(0.05, 1),
    keep=st.integers(1, 4),
)
def test_pruning_never_adds_anything(hidden, intermediate, heads, keep):
    narrow = prune_width(
        make_model(), hidden_share=hidden, intermediate_share=intermediate, heads_share=heads
    )
    for _, change in (narrow, prune_layers(narrow[0], keep)):
        assert change.after.num_parameters <= change.before.num_parameters
        assert change.after.kv_bytes_per_token <= change.before.kv_bytes_per_token
        assert change.after.flops_per_token <= change.before.flops_per_token


@pytest.mark.parametrize("share", [0, 1.5, -1, math.nan, True])
@pytest.mark.parametrize("name", ["hidden_share", "intermediate_share", "heads_share"])
def test_rejects_what_is_no_share(name, share):
    with pytest.raises(ValueError, match=f"{name}={share}: must be a share, > 0 and <= 1"):
        prune_width(make_model(), **{name: share})


@pytest.mark.parametrize(("weights", "stored"), [(None, 2.0), ("fp8", 1.0)])
def test_2_4_keeps_half_of_each_weight_and_an_eighth_of_a_byte(weights, stored):
    sparse, change = sparsify_2_4(make_model(weights=weights))
    saved = change.before.weight_bytes - change.after.weight_bytes
    assert saved == 4 * LAYER * (stored - (stored / 2 + 1 / 8))
    assert change.before.flops_per_token - change.after.flops_per_token == 4 * LAYER
    assert change.after.num_parameters == change.before.num_parameters
    assert sparse.sparsity == "2:4"
    assert any("sparse tensor cores" in remark for remark in change.remarks)


def test_2_4_of_bf16_matrices_takes_9_sixteenths():
    model = make_model()
    role = model.layer_matrices()[0].role
    assert sparsify_2_4(model)[0].bytes_per_weight(role) == 0.5625 * model.bytes_per_weight(role)


def test_unstructured_sparsity_saves_nothing_but_disk_and_says_so():
    """Half of 4 layers' weights of 2 bytes are not written; each has a bit that says whether it is."""
    model = make_model()
    same, change = sparsify_unstructured(model, 0.5)
    assert same == model
    assert change.before.checkpoint_bytes - change.after.checkpoint_bytes == 4 * LAYER * (2 * 0.5 - 1 / 8)
    assert replace(change.after, checkpoint_bytes=change.before.checkpoint_bytes) == change.before
    assert "saves no time and no memory" in change.remarks[0]


def test_a_file_with_few_zeros_is_written_as_it_was():
    change = sparsify_unstructured(make_model(), 0.01)[1]
    assert change.after == change.before


def test_rejects_a_share_of_zeros_that_is_none():
    with pytest.raises(ValueError, match=r"share=1\.2: must be a share"):
        sparsify_unstructured(make_model(), 1.2)


def test_distillation_compares_teacher_and_student(models):
    teacher, student = models["llama3_1_70b"], models["llama3_1_8b"]
    chosen, change = distill(teacher, student)
    assert chosen is student
    assert change.before.num_parameters == 70_553_706_496
    assert change.after.num_parameters == 8_030_261_248
    assert change.remarks == ()


def test_distillation_warns_of_other_vocabularies_and_larger_students(models):
    remarks = distill(models["llama2_7b"], models["llama3_1_8b"])[1].remarks
    assert "vocabularies differ (32,000 and 128,256)" in remarks[0]
    assert remarks[1] == "llama-3.1-8b is no smaller than llama-2-7b"


def test_a_change_reads_as_before_after_and_share():
    text = str(prune_layers(make_model(), 2)[1]).splitlines()
    assert text[0] == "2 of 4 layers kept:"
    assert text[4] == "  KV of a token: 2.048 -> 1.024 kB (50.0%)"
    assert text[-1].startswith("  quality must be won back")
