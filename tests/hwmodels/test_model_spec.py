"""Sizes of models against the textbook."""

import math
from dataclasses import replace

import pytest

from hwmodels.model_spec import ModelSpec


def make_model(**given):
    """A small model: 4 query heads over 2 KV heads."""
    settings = {
        "name": "tiny",
        "num_layers": 2,
        "hidden_size": 8,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 2,
        "intermediate_size": 16,
        "vocab_size": 10,
        "max_position_embeddings": 64,
    }
    return ModelSpec(**{**settings, **given})


def test_llama_2_7b_holds_524288_bytes_of_kv_a_token(models):
    assert models["llama2_7b"].kv_bytes_per_token() == 524_288


def test_llama_2_13b_batch_of_32_with_2048_tokens_holds_54_gb_of_kv(models):
    assert models["llama2_13b"].kv_bytes_per_token() * 32 * 2048 == pytest.approx(54e9, rel=0.01)


def test_llama_2_7b_has_exactly_the_parameters_of_its_checkpoint(models):
    assert models["llama2_7b"].num_parameters == 6_738_415_616


def test_parameters_by_hand():
    """Layer: q, o 2 x 64; k, v 2 x 32; MLP 3 x 128; norms 16: 592. Twice; two tables of 80; final norm 8."""
    assert make_model().num_parameters == 2 * 592 + 2 * 80 + 8


def test_tied_embeddings_are_counted_once():
    assert make_model().num_parameters - make_model(tie_word_embeddings=True).num_parameters == 80


def test_biases_and_qk_norms_are_counted():
    """A bias per output of q, k, v: (4 + 2 x 2) heads of 2; two norms of head_dim; both in 2 layers."""
    plain = make_model().num_parameters
    assert make_model(qkv_bias=True).num_parameters - plain == 2 * 16
    assert make_model(qk_norm=True).num_parameters - plain == 2 * 4


def test_ranks_share_matrices_and_copy_norms():
    """Matrices 2 x 576 + 2 x 80 elements are halved; norms 2 x 16 + 8 are not; 2 bytes each."""
    assert make_model().weight_bytes_per_rank(1) == (1312 + 40) * 2 == 2 * make_model().num_parameters
    assert make_model().weight_bytes_per_rank(2) == (1312 / 2 + 40) * 2


def test_scarce_kv_heads_are_copied():
    """4 ranks, 2 KV heads: each rank holds a whole one, so k and v weigh twice as much: 2 x 2 x 32 more."""
    assert make_model().kv_heads_per_rank(4) == 1
    assert make_model().kv_bytes_per_token(4) == make_model().kv_bytes_per_token(2)
    assert make_model().weight_bytes_per_rank(4) == ((1312 + 128) / 4 + 40) * 2


@pytest.mark.parametrize("name", ["llama3_1_70b", "qwen2_5_7b", "smollm2_135m"])
def test_more_ranks_never_hold_more_each(models, name):
    model = models[name]
    sizes = [size for size in range(1, model.num_heads + 1) if model.divides(size)]
    assert len(sizes) > 1
    weights = [model.weight_bytes_per_rank(size) for size in sizes]
    kv = [model.kv_bytes_per_token(size) for size in sizes]
    assert weights == sorted(weights, reverse=True)
    assert kv == sorted(kv, reverse=True)


def test_rejects_ranks_that_do_not_divide_the_heads(models):
    with pytest.raises(
        ValueError, match=r"tensor_parallel_size=8: must divide the 28 attention heads.*nearest: 4$"
    ):
        models["qwen2_5_7b"].check_tensor_parallel_size(8)
    with pytest.raises(ValueError, match=r"tensor_parallel_size=0: .*nearest: 1"):
        models["qwen2_5_7b"].check_tensor_parallel_size(0)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_layers": 0}, "num_layers=0: must be a whole number >= 1"),
        ({"num_kv_heads": 3}, "num_kv_heads=3: must divide num_heads=4; nearest: 2"),
        ({"dtype": "fp8"}, "dtype=fp8: must be bf16, fp16 or fp32"),
        ({"sliding_window": 0}, "sliding_window=0: must be a whole number >= 1, or null"),
        ({"head_dim": math.nan}, "head_dim=nan: must be a whole number >= 1"),
        ({"num_heads": True}, "num_heads=True: must be a whole number >= 1"),
    ],
)
def test_rejects_impossible_shapes(given, message):
    with pytest.raises(ValueError, match=message):
        make_model(**given)


def test_fp32_weighs_twice_as_much(models):
    model = models["llama2_7b"]
    assert replace(model, dtype="fp32").weight_bytes_per_rank(1) == 2 * model.weight_bytes_per_rank(1)
