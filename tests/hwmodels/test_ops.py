"""FLOPs and bytes of operators against the closed forms of the literature."""

import numpy as np
import pytest

from hwmodels.iteration import IterationShape, causal_pairs
from hwmodels.ops import Collective, iteration_operators

PREFILL = IterationShape(0, 0, 1, 512, causal_pairs(512), 512, 512)
DECODE = IterationShape(32, 32 * 1024, 0, 0, 0, 0, 32)


def total(model, ranks, shape, num_tokens, quantity, components):
    return sum(
        op.calls * getattr(op, quantity).of(shape, num_tokens)
        for op in iteration_operators(model, ranks)
        if op.component in components and op.collective is None
    )


def test_causal_pairs_by_hand():
    assert causal_pairs(4) == 10
    assert causal_pairs(2, 2) == 7
    assert causal_pairs(2) + causal_pairs(2, 2) == causal_pairs(4)


def test_causal_pairs_of_many_chunks_are_those_of_each():
    cached = np.arange(0, 10**6, 4096)
    assert causal_pairs(4096, cached).tolist() == [causal_pairs(4096, c) for c in cached.tolist()]


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_matrix_products_take_two_flops_a_weight_and_token(models, ranks):
    """2 N D, N without the embedding table, shared out evenly over the ranks."""
    model = models["llama3_1_8b"]
    flops = total(model, ranks, PREFILL, 512, "flops", ("gemm", "lm_head"))
    assert ranks * flops == 2 * model.num_matmul_parameters * 512


def test_attention_takes_four_flops_a_pair_head_dimension_and_layer(models):
    """4 L S d over all heads, and half of it under the causal mask: Llama-2-7B, 512 tokens: 68.9e9."""
    model = models["llama2_7b"]
    flops = total(model, 1, PREFILL, 512, "flops", ("attention",))
    assert flops == 4 * 32 * 32 * 128 * (512 * 513 / 2)
    assert flops == pytest.approx(68.9e9, rel=0.001)


def test_decode_attention_reads_the_kv_of_every_context(models):
    model = models["llama2_13b"]
    read = total(model, 1, DECODE, 32, "bytes_moved", ("attention",))
    assert read == 32 * 1024 * model.kv_bytes_per_token()


def test_weights_are_read_once_whatever_the_batch(models):
    model = models["llama3_1_8b"]
    fixed = sum(op.calls * op.bytes_moved.fixed for op in iteration_operators(model, 1))
    assert fixed == 2 * model.num_matmul_parameters


def test_a_gemm_by_hand(models):
    """Llama-2-7B o_proj, fp16, 3 tokens: 2 x 3 x 4096^2 FLOPs, (4096^2 + 2 x 3 x 4096) x 2 bytes."""
    (o_proj,) = (op for op in iteration_operators(models["llama2_7b"], 1) if op.name == "o_proj")
    shape = IterationShape(3, 30, 0, 0, 0, 0, 3)
    assert o_proj.flops.of(shape, 3) == 2 * 3 * 4096**2
    assert o_proj.bytes_moved.of(shape, 3) == (4096**2 + 2 * 3 * 4096) * 2


def test_ranks_reduce_after_embedding_attention_and_mlp_and_gather_the_logits(models):
    operators = iteration_operators(models["llama3_1_8b"], 4)
    messages = {op.collective: (op.calls, op.bytes_moved.of(DECODE, 32)) for op in operators if op.collective}
    assert messages == {
        Collective.all_reduce: (2 * 32 + 1, 32 * 4096 * 2),
        Collective.all_gather: (1, 32 * 128_256 * 2),
    }


def test_a_single_rank_communicates_nothing(models):
    assert not any(op.collective for op in iteration_operators(models["llama3_1_8b"], 1))


def test_only_qwen3_normalises_queries_and_keys(models):
    def names(model):
        return {op.name for op in iteration_operators(model, 1)}

    assert names(models["qwen3_8b"]) - names(models["llama3_1_8b"]) == {"qk_norm"}


def test_rejects_ranks_that_do_not_divide_the_heads(models):
    with pytest.raises(ValueError, match="tensor_parallel_size=5: must divide"):
        iteration_operators(models["llama3_1_8b"], 5)
