"""Sizes of models against the textbook."""

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


def grouped(**given):
    return GroupedQueryAttention(**{"num_heads": 4, "num_kv_heads": 2, "head_dim": 2, **given})


def latent(**given):
    """Returns latent attention with 4 heads and 6 + 2 = 8 cached elements."""
    sizes = {"kv_lora_rank": 6, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 3}
    return LatentAttention(**{"num_heads": 4, "q_lora_rank": 5, **sizes, **given})


def linear(**given):
    sizes = {"num_key_heads": 2, "key_head_dim": 3, "num_value_heads": 4, "value_head_dim": 5}
    return LinearAttention(**{**sizes, **given})


def experts(**given):
    return MixtureOfExperts(**{"num_experts": 8, "top_k": 2, "intermediate_size": 4, **given})


def make_model(*blocks, **given):
    """Returns a small model; by default 2 layers, 4 query heads over 2 KV heads and an MLP of 16."""
    default = Block(count=2, attention=grouped(), mlp=DenseMlp(intermediate_size=16))
    shape = {"name": "tiny", "hidden_size": 8, "vocab_size": 10, "max_position_embeddings": 64}
    return ModelSpec(**{**shape, "blocks": blocks or (default,), **given})


def one_layer(attention=None, mlp=None, **given):
    block = Block(count=1, attention=attention or grouped(), mlp=mlp or DenseMlp(intermediate_size=16))
    return make_model(block, **given)


def added(model, other):
    return model.num_parameters - other.num_parameters


# Dense models


def test_llama_2_7b_holds_524288_bytes_of_kv_a_token(models):
    assert models["llama2_7b"].kv_bytes_per_token() == 524_288


def test_llama_2_13b_batch_of_32_with_2048_tokens_holds_54_gb_of_kv(models):
    assert models["llama2_13b"].kv_bytes_per_token() * 32 * 2048 == pytest.approx(54e9, rel=0.01)


def test_500b_multi_head_model_with_512_times_2048_tokens_holds_3_tb_of_kv():
    """PaLM 540B as a multi-head model, heads of 128 (Pope et al., 2022): "the KV cache totals 3 TB"."""
    attention = GroupedQueryAttention(num_heads=48, num_kv_heads=48, head_dim=128)
    mlp = DenseMlp(intermediate_size=73728)
    palm = make_model(Block(count=118, attention=attention, mlp=mlp), hidden_size=18432)
    kv_bytes = palm.kv_bytes_per_token() * 2048 * 512
    assert kv_bytes == 2 * 118 * 48 * 128 * 2048 * 2 * 512 == pytest.approx(3e12, rel=0.02)


def test_parameters_by_hand():
    """Layer: q, o 2 x 64; k, v 2 x 32; MLP 3 x 128; norms 16: 592. Twice; two tables of 80; final norm 8."""
    assert make_model().num_parameters == 2 * 592 + 2 * 80 + 8


def test_a_token_is_multiplied_with_all_matrices_and_one_table():
    """2 x 576 of the layers and the LM head's 80; embedding table and norms are not multiplied with."""
    assert make_model().num_matmul_parameters == 2 * 576 + 80
    assert make_model().flops_per_token == 2 * (2 * 576 + 80)


def test_all_parameters_of_a_dense_model_are_active():
    for tied in (True, False):
        model = make_model(tie_word_embeddings=tied)
        assert model.num_active_parameters == model.num_parameters


def test_tied_embeddings_are_counted_once():
    assert added(make_model(), make_model(tie_word_embeddings=True)) == 80


@pytest.mark.parametrize(
    ("attention", "more"),
    [
        ({"qkv_bias": True}, (4 + 2 * 2) * 2),
        ({"o_bias": True}, 8),
        ({"qk_norm": True}, 2 * 2),
        ({"sinks": True}, 4),
        ({"output_gate": True}, 8 * 4 * 2),
        ({"shares_kv": True}, -2 * 8 * 2 * 2),
        ({"window": 4}, 0),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_each_switch_of_attention_adds_its_weights(attention, more):
    assert added(one_layer(grouped(**attention)), one_layer()) == more


def test_a_plain_mlp_has_two_matrices_and_a_gated_one_three():
    assert added(one_layer(), one_layer(mlp=DenseMlp(intermediate_size=16, gated=False))) == 8 * 16
    biased = DenseMlp(intermediate_size=16, bias=True)
    assert added(one_layer(mlp=biased), one_layer()) == 2 * 16 + 8


# Tensor parallelism


def test_ranks_share_matrices_and_copy_norms():
    """Matrices 2 x 576 + 2 x 80 elements are halved; norms 2 x 16 + 8 are not; 2 bytes each."""
    assert make_model().weight_bytes_per_rank(1) == (1312 + 40) * 2 == 2 * make_model().num_parameters
    assert make_model().weight_bytes_per_rank(2) == (1312 / 2 + 40) * 2


def test_scarce_kv_heads_are_copied():
    """4 ranks, 2 KV heads: each rank holds a whole one, so k and v weigh twice as much; of 10 rows of each
    table a rank holds 3.
    """
    assert grouped().kv_heads_per_rank(4) == 1
    assert make_model().kv_bytes_per_token(4) == make_model().kv_bytes_per_token(2)
    assert make_model().weight_bytes_per_rank(4) == ((2 * 576 + 128) / 4 + 2 * 3 * 8 + 40) * 2


@pytest.mark.parametrize("name", ["llama3_1_70b", "qwen2_5_7b", "smollm2_135m", "deepseek_r1", "gpt_oss_20b"])
def test_more_ranks_never_hold_more_each(models, name):
    model = models[name]
    sizes = [size for size in range(1, 129) if model.divides(size)]
    assert len(sizes) > 1
    weights = [model.weight_bytes_per_rank(size) for size in sizes]
    kv = [model.kv_bytes_per_token(size) for size in sizes]
    assert weights == sorted(weights, reverse=True)
    assert kv == sorted(kv, reverse=True)


@given(
    heads=st.sampled_from([1, 2, 4, 8, 16]),
    kv_heads=st.sampled_from([1, 2, 4, 8, 16]),
    ranks=st.integers(1, 16),
    hidden=st.integers(1, 100),
    width=st.integers(1, 100),
    vocab=st.integers(1, 1000),
)
def test_ranks_together_hold_at_least_the_model(heads, kv_heads, ranks, hidden, width, vocab):
    attention = grouped(num_heads=heads, num_kv_heads=min(heads, kv_heads))
    model = one_layer(attention, DenseMlp(intermediate_size=width), hidden_size=hidden, vocab_size=vocab)
    if model.divides(ranks):
        assert ranks * model.weight_bytes_per_rank(ranks) >= 2 * model.num_parameters
        assert ranks * model.kv_bytes_per_token(ranks) >= model.kv_bytes_per_token()
    else:
        with pytest.raises(ValueError, match=f"tensor_parallel_size={ranks}: .* nearest: "):
            model.check_tensor_parallel_size(ranks)


def test_rejects_ranks_that_do_not_divide_the_heads(models):
    with pytest.raises(
        ValueError,
        match=r"tensor_parallel_size=8: must divide the 28 attention heads, and divide or be a multiple of "
        r"the 4 KV heads of qwen2.5-7b; nearest: 4$",
    ):
        models["qwen2_5_7b"].check_tensor_parallel_size(8)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=0: .*nearest: 1"):
        models["qwen2_5_7b"].check_tensor_parallel_size(0)


def test_the_size_proposed_is_never_larger_than_the_one_asked_for(models):
    """9 attention heads and 3 KV heads: 9 ranks are nearer to 8 than 3 are."""
    with pytest.raises(ValueError, match=r"tensor_parallel_size=8: .*nearest: 3$"):
        models["smollm2_135m"].check_tensor_parallel_size(8)


def test_rejects_ranks_that_do_not_divide_each_kind_of_attention():
    blocks = [
        Block(count=1, attention=attention, mlp=DenseMlp(intermediate_size=16))
        for attention in (grouped(), linear(), latent())
    ]
    with pytest.raises(
        ValueError,
        match=r"4 attention heads, .*; divide the 2 key heads of the linear attention; "
        "divide the 4 attention heads of tiny; nearest: 2",
    ):
        make_model(*blocks).check_tensor_parallel_size(4)


# Latent attention


def test_mla_parameters_by_hand():
    """q_a and kv_a 8 x (5 + 8), q_b 5 x 4 x 5, kv_b 6 x 4 x 6, o 4 x 3 x 8, norms 5 + 6."""
    matrices = 8 * 13 + 100 + 144 + 96
    assert sum(matrix.elements for matrix in latent().matrices(8)) == matrices
    assert latent().vector_elements(8) == 11


def test_mla_without_compressed_queries_projects_them_at_once():
    names = {matrix.name: matrix.elements for matrix in latent(q_lora_rank=None).matrices(8)}
    assert names == {"q_proj": 8 * 4 * 5, "kv_a_proj": 8 * 8, "kv_b_proj": 144, "o_proj": 96}


def test_mla_copies_the_cache_and_the_down_projections_on_every_rank():
    assert latent().kv_bytes_per_token("bf16", 4) == latent().kv_bytes_per_token("bf16", 1) == 16
    halves = {matrix.name: matrix.elements for matrix in latent().matrices(8, 2)}
    assert halves == {"qkv_a_proj": 8 * 13, "q_b_proj": 50, "kv_b_proj": 72, "o_proj": 48}


def test_deepseek_v2_caches_93_percent_less_than_deepseek_67b():
    """The paper's claim (2024, abstract): 60 layers of 512 + 64, cached in 6 bits on average (section 3.2.3),
    against 95 layers of 8 KV heads in bf16. At the same precision it is 82.2 %, and 98.2 % less than
    multi-head attention with the same 128 heads of 128.
    """
    v2 = LatentAttention(
        num_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    dense_67b = GroupedQueryAttention(num_heads=64, num_kv_heads=8, head_dim=128)
    multi_head = GroupedQueryAttention(num_heads=128, num_kv_heads=128, head_dim=128)
    elements = v2.kv_bytes_per_token("bf16") / 2
    assert elements == 576
    assert multi_head.kv_bytes_per_token("bf16") / 2 == 2 * 128 * 128
    saved = 1 - 60 * elements * 6 / (95 * dense_67b.kv_bytes_per_token("bf16") * 8)
    assert saved == pytest.approx(0.933, abs=0.001)
    assert 1 - 60 * elements / (95 * dense_67b.kv_bytes_per_token("bf16") / 2) == pytest.approx(
        0.822, abs=0.001
    )
    assert 1 - elements / (2 * 128 * 128) == pytest.approx(0.982, abs=0.001)


def test_an_indexer_has_weights_and_a_key_in_the_cache():
    """index q 5 x 2 x 3, k 8 x 3, weights 8 x 2; layer norm 2 x 3; a key of 3 in fp8 and its fp32 scale."""
    sparse = latent(sparse_top_k=16, index_n_heads=2, index_head_dim=3)
    assert added(one_layer(sparse), one_layer(latent())) == 30 + 24 + 16 + 6
    assert sparse.kv_bytes_per_token("bf16") - latent().kv_bytes_per_token("bf16") == 3 + 4


# Windows, shared KV, linear attention


def test_windows_bound_what_a_sequence_keeps_but_not_what_a_token_costs():
    """A token takes 2 x 2 x 2 x 2 = 16 bytes a layer."""
    mlp = DenseMlp(intermediate_size=16)
    model = make_model(
        Block(count=5, attention=grouped(window=8), mlp=mlp), Block(count=1, attention=grouped(), mlp=mlp)
    )
    assert model.kv_bytes_per_token() == 6 * 16
    assert [(layers.count, layers.window) for layers in model.kv_layers()] == [(5, 8), (1, None)]


def test_layers_that_share_kv_keep_none():
    mlp = DenseMlp(intermediate_size=16)
    blocks = [
        Block(count=count, attention=grouped(shares_kv=shares), mlp=mlp)
        for count, shares in ((3, False), (2, True))
    ]
    assert make_model(*blocks).kv_bytes_per_token() == 3 * 16
    assert len(make_model(*blocks).kv_layers()) == 1


def test_linear_attention_by_hand():
    """q, k of 2 x 3, v and z of 4 x 5: 8 x 52; gates 8 x 8; out 20 x 8; convolution 32 x 4, 8 + 5 more."""
    model = one_layer(linear())
    assert sum(matrix.elements for matrix in linear().matrices(8)) == 416 + 64 + 160
    assert linear().vector_elements(8) == 128 + 13
    assert (model.kv_layers(), model.kv_bytes_per_token()) == ([], 0)
    assert model.state_bytes_per_sequence() == 4 * 3 * 5 * 4 + 32 * 3 * 2
    assert model.state_bytes_per_sequence(2) == model.state_bytes_per_sequence() / 2
    assert one_layer(linear(state_dtype="bf16")).state_bytes_per_sequence() == 4 * 3 * 5 * 2 + 32 * 3 * 2
    assert make_model().state_bytes_per_sequence() == 0


# Experts


def test_experts_by_hand():
    """Attention 192, norms 24, tables 160; router 64; an expert 3 x 8 x 4; shared ones 3 x 8 x 6, gate 8."""
    model = one_layer(mlp=experts(shared_intermediate_size=6, shared_gate=True))
    assert model.num_parameters == 192 + 24 + 160 + 64 + 8 * 96 + 144 + 8
    assert model.num_active_parameters == model.num_parameters - 6 * 96
    assert model.num_matmul_parameters == 192 + 64 + 2 * 96 + 144 + 80


def test_biases_of_experts_and_router():
    biased = one_layer(mlp=experts(bias=True, router_bias=True))
    assert added(biased, one_layer(mlp=experts())) == 8 * (2 * 4 + 8) + 8


def test_experts_are_shared_out_and_each_may_be_cut():
    """8 experts of 96 weights; whole on 4 ranks of expert parallelism: 2 each, or in halves: 2 halves."""
    model = one_layer(mlp=experts())

    def routed(**ranks):
        return model.weight_bytes_per_rank(1, **ranks) - model.weight_bytes_per_rank(1)

    assert routed(expert_parallel_size=4) == -2 * 96 * 6
    assert routed(expert_parallel_size=4, moe_tensor_parallel_size=2) == -2 * 96 * 7


def test_tensor_parallel_ranks_cut_experts_unless_they_share_them_out():
    model = one_layer(mlp=experts())
    cut = model.weight_bytes_per_rank(2)
    assert cut == model.weight_bytes_per_rank(2, moe_tensor_parallel_size=2)
    assert cut == model.weight_bytes_per_rank(2, expert_parallel_size=2)
    assert model.weight_bytes_per_rank(2, moe_tensor_parallel_size=1) == cut + 8 * 96


# Formats


def test_fp32_weighs_twice_as_much(models):
    model = models["llama2_7b"]
    assert replace(model, dtype="fp32").weight_bytes_per_rank(1) == 2 * model.weight_bytes_per_rank(1)


def test_only_the_matrices_of_layers_are_quantised():
    """2 x 576 weights in 1 byte; norms 40 and tables 160 stay in 2."""
    assert make_model(weights="fp8").weight_bytes_per_rank() == 2 * 576 + 2 * 200


def test_experts_may_be_stored_otherwise():
    """Routed experts 8 x 96 in half a byte and 1/32; the others as they are."""
    plain = one_layer(mlp=experts())
    mixed = one_layer(mlp=experts(), moe_weights="mxfp4")
    assert plain.weight_bytes_per_rank() - mixed.weight_bytes_per_rank() == 768 * (2 - 0.5 - 1 / 32)
    assert one_layer(mlp=experts(), weights="fp8").weight_format_of(plain.layer_matrices()[-1].role) == "fp8"


def test_with_weights_changes_formats_and_nothing_else():
    model = make_model(kv_cache_dtype="int8")
    changed = model.with_weights("int4_wo")
    assert (changed.weights, changed.kv_cache_dtype) == ("int4_wo", "int8")
    assert changed.with_weights(None) == model
    assert model.with_weights(None, kv_cache_dtype="fp8").kv_cache_dtype == "fp8"


@pytest.mark.parametrize(("kv", "head_bytes"), [("auto", 4), ("fp8", 2), ("int8", 2 + 2), ("int4", 1 + 4)])
def test_kv_formats_with_their_scales(kv, head_bytes):
    """2 layers x (K, V) x 2 heads of 2 elements."""
    assert make_model(kv_cache_dtype=kv).kv_bytes_per_token() == 2 * 2 * 2 * head_bytes


def test_2_4_sparsity_stores_half_of_the_weights_and_their_places():
    dense, sparse = make_model(), make_model(sparsity="2:4")
    assert sparse.weight_bytes_per_rank() == 2 * 576 * 2 * 0.5625 + 2 * 200
    assert dense.flops_per_token - sparse.flops_per_token == 2 * 576


# What cannot be


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: grouped(num_kv_heads=3), "num_kv_heads=3: must divide num_heads=4; nearest: 2"),
        (lambda: grouped(window=0), "window=0: must be >= 1, or null"),
        (lambda: grouped(head_dim=math.nan), "head_dim=nan: must be a whole number >= 1"),
        (lambda: grouped(num_heads=True), "num_heads=true: must be a whole number >= 1"),
        (lambda: latent(q_lora_rank=0), "q_lora_rank=0: must be >= 1, or null"),
        (lambda: latent(sparse_top_k=4), "index_n_heads=0: must be .* where sparse_top_k is given"),
        (lambda: linear(num_value_heads=3), "num_key_heads=2: must divide num_value_heads=3"),
        (lambda: linear(state_dtype="int8"), "state_dtype=int8: must be one of fp32, bf16, fp16"),
        (lambda: experts(top_k=9), "top_k=9: must be 1 to num_experts=8"),
        (lambda: experts(shared_intermediate_size=-1), "shared_intermediate_size=-1: must be >= 0"),
        (lambda: DenseMlp(intermediate_size=0), "intermediate_size=0: must be >= 1"),
        (lambda: replace(make_model().blocks[0], count=0), "count=0: must be >= 1"),
        (lambda: make_model(blocks=()), r"blocks=\(\): must hold at least one block"),
        (lambda: make_model(dtype="fp8"), "dtype=fp8: must be one of bf16, fp16, fp32"),
        (lambda: make_model(weights="int3"), "^weights=int3: must be one of fp32, bf16"),
        (lambda: one_layer(mlp=experts(), moe_weights="x"), "^moe_weights=x: must be one of fp32, bf16"),
        (lambda: make_model(moe_weights="fp8"), "moe_weights=fp8: tiny has no experts; set weights"),
        (
            lambda: make_model(kv_cache_dtype="fp4"),
            "kv_cache_dtype=fp4: must be one of auto, fp32, bf16, fp16, fp8, int8, int4, nvfp4",
        ),
        (lambda: make_model(sparsity="1:4"), "sparsity=1:4: must be 2:4, or null; nearest: 2:4"),
    ],
)
def test_rejects_impossible_shapes(make, message):
    with pytest.raises(ValueError, match=message):
        make()
