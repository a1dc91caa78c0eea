"""Effects of pruning, sparsity and distillation on bytes and FLOPs."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.model import (
    Block,
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LinearAttention,
    MixtureOfExperts,
    ModelSpec,
)
from hwmodels.model.transforms import (
    Distill,
    PruneDepth,
    PruneWidth,
    Sparse24,
    SparseUnstructured,
    shared_out,
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
    model = make_model()
    pruned = PruneDepth(keep=0.5).applied(model)
    assert pruned.num_layers == 2
    assert model.num_parameters - pruned.num_parameters == 2 * (LAYER + 2 * 256)
    assert model.flops_per_token - pruned.flops_per_token == 2 * 2 * LAYER
    assert pruned.kv_bytes_per_token() == model.kv_bytes_per_token() / 2
    assert pruned.weight_bytes_per_rank() == 2 * pruned.num_parameters


def test_kinds_of_layers_are_pruned_alike_and_may_vanish():
    window = GroupedQueryAttention(num_heads=8, num_kv_heads=4, head_dim=32, window=16)
    model = make_model(layers(10, window), layers(2))
    assert [block.count for block in PruneDepth(keep=0.5).applied(model).blocks] == [5, 1]
    assert [block.count for block in PruneDepth(keep=0.01).applied(model).blocks] == [1]


@given(counts=st.lists(st.integers(1, 100), min_size=1, max_size=5), data=st.data())
def test_shares_add_up_and_are_off_by_less_than_one(counts, data):
    total = data.draw(st.integers(1, sum(counts)))
    shares = shared_out(total, counts)
    assert sum(shares) == total
    for share, count in zip(shares, counts, strict=True):
        assert abs(share - total * count / sum(counts)) < 1
        assert share <= count


def test_width_by_hand():
    """Hidden 128, MLP 256, 4 heads over 2 KV heads of 32."""
    model = make_model()
    pruned = PruneWidth(hidden=0.5, intermediate=0.5, heads=0.5).applied(model)
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 256
    assert pruned.num_parameters == 4 * (layer + 2 * 128) + 2 * 1000 * 128 + 128
    assert pruned.kv_bytes_per_token() == model.kv_bytes_per_token() / 2
    assert pruned.hidden_size == 128


def test_pruned_widths_are_multiples_of_64_and_never_larger():
    pruned = PruneWidth(hidden=0.6, intermediate=0.01).applied(make_model(hidden_size=200))
    assert (pruned.hidden_size, pruned.blocks[0].mlp.intermediate_size) == (128, 64)
    assert PruneWidth(hidden=0.5).applied(make_model(hidden_size=40)).hidden_size == 40


def test_every_kind_of_attention_loses_heads_in_whole_groups():
    latent = LatentAttention(
        num_heads=8, kv_lora_rank=64, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32
    )
    linear = LinearAttention(num_key_heads=4, key_head_dim=32, num_value_heads=8, value_head_dim=32)
    experts = MixtureOfExperts(num_experts=4, top_k=2, intermediate_size=256, shared_intermediate_size=128)
    model = make_model(layers(), layers(1, latent, experts), layers(1, linear))
    pruned = PruneWidth(heads=0.5, intermediate=0.5).applied(model)
    grouped, latent, linear = (block.attention for block in pruned.blocks)
    assert (grouped.num_heads, grouped.num_kv_heads) == (4, 2)
    assert latent.num_heads == 4
    assert (linear.num_key_heads, linear.num_value_heads) == (2, 4)
    mlp = pruned.blocks[1].mlp
    assert (mlp.num_experts, mlp.intermediate_size, mlp.shared_intermediate_size) == (4, 128, 64)


@given(hidden=st.floats(0.05, 1), intermediate=st.floats(0.05, 1), heads=st.floats(0.05, 1))
def test_pruning_never_adds_anything(hidden, intermediate, heads):
    model = make_model()
    narrow = PruneWidth(hidden=hidden, intermediate=intermediate, heads=heads).applied(model)
    for before, after in ((model, narrow), (narrow, PruneDepth(keep=hidden).applied(narrow))):
        assert after.num_parameters <= before.num_parameters
        assert after.kv_bytes_per_token() <= before.kv_bytes_per_token()
        assert after.flops_per_token <= before.flops_per_token


@pytest.mark.parametrize("share", [0, 1.5, -1, math.nan, True])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (PruneDepth, "keep"),
        (PruneWidth, "hidden"),
        (PruneWidth, "intermediate"),
        (PruneWidth, "heads"),
        (SparseUnstructured, "zeros"),
    ],
)
def test_rejects_what_is_no_share(kind, name, share):
    with pytest.raises(ValueError, match=f"{name}={str(share).lower()}: must be a share, > 0 and <= 1"):
        kind(**{name: share})


@pytest.mark.parametrize(("weights", "stored"), [(None, 2.0), ("fp8", 1.0)])
def test_2_4_keeps_half_of_each_weight_and_an_eighth_of_a_byte(weights, stored):
    model = make_model(weights=weights)
    sparse = Sparse24().applied(model)
    saved = model.weight_bytes_per_rank() - sparse.weight_bytes_per_rank()
    assert saved == 4 * LAYER * (stored - (stored / 2 + 1 / 8))
    assert model.flops_per_token - sparse.flops_per_token == 4 * LAYER
    assert sparse.num_parameters == model.num_parameters
    assert sparse.sparsity == "2:4"


def test_2_4_of_bf16_matrices_takes_9_sixteenths():
    model = make_model()
    role = model.layer_matrices()[0].role
    assert Sparse24().applied(model).bytes_per_weight(role) == 0.5625 * model.bytes_per_weight(role)


def test_unstructured_sparsity_saves_nothing_but_disk_and_says_so():
    """Half of 4 layers' weights of 2 bytes are not written; each has a bit that says whether it is."""
    model = make_model()
    same = SparseUnstructured(zeros=0.5).applied(model)
    assert (same.blocks, same.name, same.sparsity) == (model.blocks, model.name, None)
    file_bytes = model.weight_bytes_per_rank()
    expected = (
        f"{(file_bytes - 4 * LAYER * (2 * 0.5 - 1 / 8)) / 1e9:.4g} instead of {file_bytes / 1e9:.4g} GB"
    )
    assert expected in same.notes[0]


def test_a_file_with_few_zeros_is_written_as_it_was():
    file_gb = f"{make_model().weight_bytes_per_rank() / 1e9:.4g}"
    [note] = SparseUnstructured(zeros=0.01).applied(make_model()).notes
    assert f"{file_gb} instead of {file_gb} GB" in note


def test_the_student_is_served_and_the_note_compares_it_with_the_teacher(models):
    served = Distill(student=models["llama3_1_8b"]).applied(models["llama3_1_70b"])
    assert (served.name, served.blocks) == ("llama-3.1-8b", models["llama3_1_8b"].blocks)
    assert "parameters 70.55 -> 8.03 B (11.4 %)" in served.notes[0]


def test_the_student_is_served_in_the_number_formats_that_were_asked_for(models):
    student = models["llama3_1_8b"]
    teacher = replace(models["llama3_1_70b"], weights="fp8", kv_cache_dtype="fp8")
    served = Distill(student=student).applied(teacher)
    assert (served.weights, served.kv_cache_dtype) == ("fp8", "fp8")
    assert served.weight_bytes_per_rank() < 0.6 * student.weight_bytes_per_rank()
    own = Distill(student=replace(student, weights="int4_wo")).applied(models["llama3_1_70b"])
    assert own.weights == "int4_wo"


@pytest.mark.parametrize("transform", [PruneDepth(), PruneWidth(hidden=0.5), Sparse24()])
def test_changed_weights_are_not_those_that_were_published(transform):
    assert transform.applied(make_model(source="meta-llama/Llama-3.1-8B")).source == ""


def test_distillation_warns_of_other_vocabularies_and_larger_students(models):
    [note] = Distill(student=models["llama3_1_8b"]).applied(models["llama2_7b"]).notes
    assert "32,000 and 128,256 tokens" in note
    assert "no smaller" in note


@pytest.mark.parametrize(
    "transform", [PruneDepth(), PruneWidth(hidden=0.5), Sparse24(), SparseUnstructured()]
)
def test_what_was_said_of_the_model_is_still_said(transform):
    notes = transform.applied(make_model(notes=("tower ignored",))).notes
    assert notes[0] == "tower ignored"
    assert notes[1].startswith("model.transform: ")


def test_of_experts_the_active_parameters_are_reported_too(models):
    [note] = PruneDepth(keep=0.5).applied(models["mixtral_8x7b"]).notes
    assert "active parameters 12.88 -> 6.571 B (51.0 %)" in note
    assert "active" not in PruneDepth(keep=0.5).applied(models["llama2_7b"]).notes[0]


@pytest.mark.parametrize(
    "transform",
    [
        PruneDepth,
        PruneWidth,
        Sparse24,
        SparseUnstructured,
        lambda **own: Distill(student=make_model(), **own),
    ],
)
def test_quality_is_an_input_that_the_note_states(transform):
    note = transform(quality=0.899).applied(make_model()).notes[-1]
    assert note.endswith("Its quality is an input: 89.9 % of the original's score.")
    unknown = transform().applied(make_model()).notes[-1]
    assert unknown.endswith(
        "The loss of quality is not modelled, and none is given (model.transform.quality)."
    )
    with pytest.raises(
        ValueError, match="quality=0: must be a finite number > 0; a share of the original's score, or null"
    ):
        transform(quality=0)
