"""The operators of latent, sparse and linear attention."""

from dataclasses import replace

import pytest

from hwmodels.assembly.site import Kernels
from hwmodels.model import LinearAttention
from hwmodels.operators.attention import DecodeAttention, HeadLayout
from hwmodels.operators.mla import MlaCurve, MlaDecode, MlaHeads
from tests.hwmodels.assembly.listed import BALANCED, Listed, latent, make_model


def mla_heads(kv_bytes_per_element):
    """Returns the heads of `latent` on one rank."""
    return MlaHeads(
        num_heads=8,
        kv_lora_rank=32,
        rope_head_dim=8,
        nope_head_dim=16,
        v_head_dim=24,
        kv_bytes_per_element=kv_bytes_per_element,
    )


def test_absorbed_decode_of_mla_reads_one_vector_a_token(site, make_shape):
    """2 heads (2 rank + rope) FLOPs and (rank + rope) x 2 bytes a context token."""
    listed = Listed(site(make_model(latent())), make_shape([100, 50]))
    assert listed.once("attention_decode", "flops") == 2 * 8 * (2 * 32 + 8) * 150
    assert listed.once("attention_decode", "stored_bytes") == (32 + 8) * 2 * 150
    assert listed.of("latent_expansion_decode") == []


def test_prefill_of_mla_attends_to_expanded_heads_and_expands_what_is_cached_again(site, make_shape):
    """2 heads (nope + rope + v) a pair; kv_b_proj, 32 x 8 x (16 + 24), for each of 70 cached tokens."""
    listed = Listed(site(make_model(latent())), make_shape(chunks=[(10, 70)]))
    assert listed.once("attention_prefill", "flops") == 2 * 8 * (16 + 8 + 24) * (700 + 55)
    assert listed.once("latent_expansion", "flops") == 2 * 32 * 8 * 40 * 70
    fresh = Listed(site(make_model(latent())), make_shape(chunks=[(10, 0)]))
    assert fresh.once("latent_expansion", "flops") == fresh.once("latent_expansion", "seconds") == 0
    assert fresh.once("latent_expansion", "bytes_moved") == 0
    assert listed.once("latent_expansion", "bytes_moved") == (40 * 2 + 8 * 48 * 2) * 70
    assert listed.once("latent_expansion", "stored_bytes") == 0, "attention counts what is stored"


NAIVE = Kernels(absorbed_latent_decode=False)


def test_naive_decode_of_mla_expands_its_whole_context(site, make_shape):
    """150 tokens: kv_b_proj, 32 x 8 x (16 + 24); 40 x 2 bytes read, 8 heads x (24 + 24) x 2 written."""
    listed = Listed(site(make_model(latent()), kernels=NAIVE), make_shape([100, 50]))
    assert listed.once("latent_expansion_decode", "flops") == 2 * 32 * 8 * 40 * 150
    assert listed.once("latent_expansion_decode", "stored_bytes") == 40 * 2 * 150
    assert listed.once("latent_expansion_decode", "bytes_moved") == (40 * 2 + 8 * 48 * 2) * 150
    assert (
        listed.once("latent_expansion_decode", "seconds")
        > listed.once("latent_expansion_decode", "bytes_moved") / 1e12
    )


def test_naive_decode_of_mla_is_multi_head_attention_over_what_was_expanded(site, make_shape):
    """8 heads, keys of 16 + 8, values of 24, in the model's dtype; the price is that of the attention."""
    naive = site(make_model(latent(), kv_cache_dtype="fp8"), kernels=NAIVE)
    listed = Listed(naive, make_shape([100, 50]))
    assert listed.once("attention_decode", "flops") == 2 * 8 * (16 + 8 + 24) * 150
    assert listed.once("attention_decode", "bytes_moved") == 8 * 48 * 2 * 150
    assert listed.once("attention_decode", "stored_bytes") == 0, "the expansion reads what is stored"
    heads = HeadLayout(num_heads=8, num_kv_heads=8, head_dim=24, v_head_dim=24)
    attention = DecodeAttention(heads, naive.device, naive.calibration.attention)
    assert listed.once("attention_decode", "seconds") == attention.seconds(2, 150)


def test_naive_decode_of_deepseek_r1_takes_several_times_as_long(models, site, make_shape, devices):
    """16 heads a rank: 16 x 320 x 2 bytes written and read again for 1,152 that an absorbed decode reads."""
    asked = {"model": models["deepseek_r1"], "device": devices["h200_sxm"], "tensor_parallel_size": 8}
    shape = make_shape([4096] * 64)
    names = ("attention_decode", "latent_expansion_decode")
    naive = Listed(site(kernels=NAIVE, **asked), shape).total("seconds", *names)
    absorbed = Listed(site(**asked), shape).total("seconds", *names)
    assert naive > 5 * absorbed


@pytest.mark.parametrize(("weights", "more"), [(None, 20), ("fp8_block", 44)])
def test_tensorrt_llm_launches_more_for_mla_with_prompts_and_decodes(site, make_shape, weights, more):
    """Its eager iterations run attention twice, with more calls around it in fp8 by block."""
    model = make_model(latent(), weights=weights)
    counts = {}
    for library in ("vllm", "trtllm"):
        listed = Listed(site(model, kernels=replace(BALANCED, library=library)), make_shape([100]))
        counts[library] = sum(op.calls * op.mixed_kernels for op in listed.operators)
    assert counts == {"vllm": 0, "trtllm": model.num_layers * more}


def test_sparse_attention_expands_only_what_it_attends_to(site, make_shape):
    sparse = latent(sparse_top_k=32, index_n_heads=2, index_head_dim=16)
    listed = Listed(site(make_model(sparse), kernels=NAIVE), make_shape([100] * 3))
    assert listed.once("latent_expansion_decode", "flops") == 2 * 32 * 8 * 40 * 3 * 32
    assert listed.once("attention_decode_top_32", "bytes_moved") == 8 * 48 * 2 * 3 * 32


@pytest.mark.parametrize(("kv", "token_bytes"), [("fp8", 40), ("int8", 40 + 2), ("int4", 20 + 4)])
def test_quantised_latent_vectors_have_scales(site, make_shape, kv, token_bytes):
    """One fp16 scale a vector, in int4 a zero point as well: as many bytes as the memory planner counts."""
    model = make_model(latent(), kv_cache_dtype=kv)
    listed = Listed(site(model), make_shape([100, 50]))
    assert model.kv_bytes_per_token() == 4 * token_bytes
    assert listed.once("attention_decode", "stored_bytes") == pytest.approx(150 * token_bytes)
    assert listed.once("kv_write", "bytes_moved") == pytest.approx(2 * (40 * 2 + token_bytes))
    price = MlaDecode(mla_heads(token_bytes / 40), site().device, MlaCurve())
    long = Listed(site(model), make_shape([1000]))
    assert long.once("attention_decode", "seconds") == price.seconds(1, 1000)


def test_sparse_attention_scores_all_tokens_and_attends_to_the_best(site, make_shape):
    """Index queries of 2 heads of 16; keys of 16 bytes in fp8, 4 of scale. 32 of 100 tokens are chosen."""
    sparse = latent(sparse_top_k=32, index_n_heads=2, index_head_dim=16)
    listed = Listed(site(make_model(sparse)), make_shape([100] * 3))
    assert listed.once("indexer_decode", "flops") == 2 * 2 * 16 * 300
    assert listed.once("indexer_decode", "stored_bytes") == (16 + 4) * 300
    assert listed.once("attention_decode_top_32", "flops") == 2 * 8 * (2 * 32 + 8) * 96


def test_linear_attention_moves_a_state_that_no_context_grows(site, make_shape):
    """4 value heads of 8 x 16; 3 decodes advance their states, a chunk of 20 tokens advances one."""
    linear = LinearAttention(num_key_heads=2, key_head_dim=8, num_value_heads=4, value_head_dim=16)
    model = make_model(linear)
    listed = Listed(site(model), make_shape([100, 1, 9], [(20, 7)]))
    state_bytes = model.state_bytes_per_sequence() / 4
    assert listed.once("delta_rule_decode", "flops") == 6 * 4 * 8 * 16 * 3
    assert listed.once("delta_rule_decode", "stored_bytes") == 3 * state_bytes
    assert listed.once("delta_rule_decode", "bytes_moved") == 2 * 3 * state_bytes
    assert listed.once("delta_rule_prefill", "flops") == (6 * 4 * 8 * 16 + 2 * 64 * 4 * 32) * 20
    assert listed.once("delta_rule_prefill", "stored_bytes") == state_bytes
