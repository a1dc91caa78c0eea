"""The operators of an iteration: calls, FLOPs, bytes and messages against closed forms."""

from dataclasses import replace

import numpy as np
import pytest

from hwmodels.assembly import iteration_operators
from hwmodels.assembly.site import Kernels, Site
from hwmodels.iterations.iteration import COMPONENTS, IterationShape
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.iterations.ops import Per
from hwmodels.model.lora import Lora
from hwmodels.model.matrices import Matrix
from hwmodels.model.model_spec import (
    Block,
    DenseMlp,
    GroupedQueryAttention,
    LatentAttention,
    LinearAttention,
    MixtureOfExperts,
    ModelSpec,
    Role,
)
from hwmodels.operators.attention import DecodeAttention, HeadLayout
from hwmodels.operators.calibration import Calibration
from hwmodels.operators.collectives import CollectiveCurve, all_reduce_seconds, send_recv_seconds
from hwmodels.operators.mla import MlaCurve, MlaDecode, MlaHeads
from hwmodels.operators.moe_routing import Routing

BALANCED = Kernels(routing=Routing(kind="balanced"))


def grouped(**given):
    return GroupedQueryAttention(**{"num_heads": 8, "num_kv_heads": 4, "head_dim": 16, **given})


def latent(**given):
    sizes = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}
    return LatentAttention(**{"num_heads": 8, "q_lora_rank": 48, **sizes, **given})


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


def experts(**given):
    return MixtureOfExperts(**{"num_experts": 8, "top_k": 2, "intermediate_size": 40, **given})


def make_model(attention=None, mlp=None, count=4, **given):
    """Returns a model of 4 layers, width 64, 8 query heads of 16 over 4 KV heads and an MLP of 160."""
    block = Block(count=count, attention=attention or grouped(), mlp=mlp or DenseMlp(intermediate_size=160))
    shape = {"name": "tiny", "hidden_size": 64, "vocab_size": 1000, "max_position_embeddings": 4096}
    return ModelSpec(**{**shape, "blocks": (block,), **given})


@pytest.fixture
def site(toy_device):
    """Makes a Site; what is not given: the small model on one toy device, balanced routing."""

    def make(model=None, lora=None, kernels=BALANCED, device=toy_device, **layout):
        return Site(
            model=model or make_model(),
            device=device,
            layout=ParallelLayout(**layout),
            calibration=Calibration(),
            kernels=kernels,
            lora=lora,
        )

    return make


class Listed:
    """An iteration's operators, and the batch of one device."""

    def __init__(self, site, shape, **given):
        self.operators = iteration_operators(site, **given)
        self.batch = site.layout.rank_batch(shape)

    def of(self, name):
        return [op for op in self.operators if op.name == name]

    def calls(self, name):
        return sum(op.calls for op in self.of(name))

    def once(self, name, quantity):
        """Returns the quantity of one call; all calls of that name must agree."""
        (amount,) = {float(getattr(op, quantity)(self.batch)) for op in self.of(name)}
        return amount

    def total(self, quantity, *names, components=COMPONENTS):
        """Sums a quantity over all calls of the named operators, or of all operators if none is named."""
        return sum(
            float(op.calls * getattr(op, quantity)(self.batch))
            for op in self.operators
            if (op.name in names or not names) and op.component in components
        )


# Dense layers


def test_the_operators_of_a_dense_layer_and_how_often_they_run(site, make_shape):
    listed = Listed(site(), make_shape([10]))
    calls = {op.name: op.calls for op in listed.operators}
    assert calls == {
        "embedding": 1,
        **dict.fromkeys(["attention_norm", "qkv_proj", "rotary", "kv_write"], 4),
        **dict.fromkeys(["attention_decode", "attention_prefill", "o_proj"], 4),
        **dict.fromkeys(["mlp_norm", "gate_up_proj", "activation", "down_proj"], 4),
        **dict.fromkeys(["final_norm", "lm_head", "sampling"], 1),
    }


def test_matrices_by_hand(site, make_shape):
    """3 decodes and a chunk of 7: 10 tokens, 4 sampled rows. FLOPs 2 m k n; bytes (k n + m k + m n) x 2."""
    listed = Listed(site(), make_shape([5, 6, 7], [(7, 0)]))
    shapes = {
        "qkv_proj": (10, 64, (8 + 2 * 4) * 16),
        "o_proj": (10, 128, 64),
        "gate_up_proj": (10, 64, 320),
        "down_proj": (10, 160, 64),
        "lm_head": (4, 64, 1000),
    }
    for name, (m, k, n) in shapes.items():
        assert listed.once(name, "flops") == 2 * m * k * n
        assert listed.once(name, "stored_bytes") == 2 * k * n
        assert listed.once(name, "bytes_moved") == 2 * (k * n + m * k + m * n)


def test_streams_by_hand(site, make_shape):
    """Each of 10 tokens: hidden 64 x 2 = 128 bytes; queries 128, keys 64, values 64 elements."""
    listed = Listed(site(make_model(grouped(qk_norm=True))), make_shape([5, 6, 7], [(7, 0)]))
    expected = {
        "embedding": 2 * 128,
        "attention_norm": 4 * 128,
        "mlp_norm": 4 * 128,
        "final_norm": 4 * 128,
        "qk_norm": 2 * (128 + 64) * 2,
        "rotary": 2 * (128 + 64) * 2,
        "kv_write": 2 * 64 * (2 + 2),
        "activation": (320 + 160) * 2,
    }
    for name, token_bytes in expected.items():
        assert listed.once(name, "bytes_moved") == 10 * token_bytes
    assert listed.once("sampling", "bytes_moved") == 4 * 1000 * (2 + 3 * 4)


def test_a_norm_over_all_heads_sums_squares_over_the_ranks(site, make_shape):
    """Two ranks: queries 64, keys 32 elements of 2 bytes on each; two fp32 sums per token."""
    model = make_model(grouped(qk_norm=True, qk_norm_joins_heads=True))
    whole = Listed(site(model), make_shape([5, 6, 7]))
    assert "qk_norm_all_reduce" not in {op.name for op in whole.operators}
    cut = Listed(site(model, tensor_parallel_size=2), make_shape([5, 6, 7]))
    assert cut.once("qk_norm_squares", "bytes_moved") == 3 * (64 + 32) * 2
    assert cut.once("qk_norm_all_reduce", "bytes_moved") == 3 * 8
    assert cut.once("qk_norm", "bytes_moved") == 3 * 2 * (64 + 32) * 2


@pytest.mark.parametrize(
    "name",
    ["llama2_7b", "qwen2_5_72b", "gemma3_27b", "mixtral_8x7b", "deepseek_r1", "glm_5", "qwen3_5_397b_a17b"],
)
def test_a_token_takes_2n_flops(models, site, make_shape, name):
    """N: the weights that a token is multiplied with; those of the LM head for sampled rows only."""
    model = models[name]
    listed = Listed(site(model), make_shape([1] * 5, [(95, 0)], completed=False))
    dense = 2 * (model.num_matmul_parameters - model.embedding_elements) * 100
    head = 2 * model.embedding_elements * 5
    counted = listed.total("flops", components=("gemm", "lm_head"))
    assert counted == dense + head


def test_decode_attention_takes_4_l_s_d_flops_and_the_kv_formulas_bytes(models, site, make_shape):
    """Llama-2-7B: 32 layers, d = 4,096; 8 sequences of 1,000 tokens: 524,288 bytes each of them."""
    listed = Listed(site(models["llama2_7b"]), make_shape([1000] * 8))
    assert listed.total("flops", components=("attention",)) == 4 * 32 * 8000 * 4096
    assert listed.total("stored_bytes", components=("attention",)) == 8000 * 524_288
    assert listed.total("bytes_moved", components=("attention",)) == 8000 * 524_288


def test_causal_prefill_attention_takes_half_of_4_l_s_d_a_token(models, site, make_shape):
    """S tokens: 4 L d S^2 without a mask; under it S (S + 1) / 2 pairs in place of S^2."""
    listed = Listed(site(models["llama2_7b"]), make_shape(chunks=[(1000, 0)]))
    whole = 4 * 32 * 4096 * 1000**2
    assert listed.total("flops", components=("attention",)) == whole * 1001 / 2000
    assert listed.total("stored_bytes", components=("attention",)) == 1000 * 524_288


def test_a_cached_context_adds_a_pair_for_each_new_and_cached_token(site, make_shape):
    alone, behind = (Listed(site(), make_shape(chunks=[(30, cached)])) for cached in (0, 500))
    more = behind.total("flops", "attention_prefill") - alone.total("flops", "attention_prefill")
    assert more == 4 * 4 * 128 * 30 * 500


@pytest.mark.parametrize(("kv", "element_bytes"), [("auto", 2), ("fp8", 1)])
def test_kv_is_read_and_written_in_its_own_format(site, make_shape, kv, element_bytes):
    """2 x 4 heads x 16 elements a token; written after being read in bf16."""
    listed = Listed(site(make_model(kv_cache_dtype=kv)), make_shape([100]))
    assert listed.once("attention_decode", "stored_bytes") == 100 * 128 * element_bytes
    assert listed.once("kv_write", "bytes_moved") == 128 * (2 + element_bytes)


def test_layers_that_share_kv_read_it_and_make_none(site, make_shape):
    own, sharing = (
        Listed(site(make_model(grouped(shares_kv=shares))), make_shape([100])) for shares in (False, True)
    )
    assert sharing.of("kv_write") == []
    assert own.once("qkv_proj", "flops") - sharing.once("qkv_proj", "flops") == 2 * 64 * 2 * 4 * 16
    assert sharing.once("attention_decode", "stored_bytes") == own.once("attention_decode", "stored_bytes")


def test_layers_with_a_window_attend_to_it_and_the_others_to_all(site, make_shape):
    mlp = DenseMlp(intermediate_size=160)
    blocks = (
        Block(count=5, attention=grouped(window=8), mlp=mlp),
        Block(count=1, attention=grouped(), mlp=mlp),
    )
    listed = Listed(site(replace(make_model(), blocks=blocks)), make_shape([100, 100], [(4, 2)]))
    assert listed.once("attention_decode_window_8", "flops") == 4 * 128 * 16
    assert listed.once("attention_decode", "flops") == 4 * 128 * 200
    assert listed.once("attention_decode_window_8", "stored_bytes") == 16 * 128 * 2
    assert listed.once("attention_prefill_window_8", "flops") == 4 * 128 * (2 * 4 + 10)
    assert (listed.calls("attention_decode_window_8"), listed.calls("attention_decode")) == (5, 1)


# Latent and linear attention


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


# Experts


def test_a_token_visits_top_k_experts_and_reads_their_weights(site, make_shape):
    """An expert: 3 x 64 x 40 = 7,680 weights. 1 token: 2 experts; 3 tokens, evenly: 6; 100 tokens: all 8."""
    for tokens, active in ((1, 2), (3, 6), (100, 8)):
        listed = Listed(site(make_model(mlp=experts())), make_shape([1] * tokens))
        assert listed.once("experts", "flops") == 2 * tokens * 2 * 7680
        assert listed.once("experts", "stored_bytes") == active * 7680 * 2
        assert listed.once("router", "flops") == 2 * tokens * 64 * 8


def test_shared_experts_see_every_token(site, make_shape):
    listed = Listed(site(make_model(mlp=experts(shared_intermediate_size=80))), make_shape([1] * 5))
    assert listed.once("shared_gate_up_proj", "flops") == 2 * 5 * 64 * 160
    assert listed.once("shared_down_proj", "flops") == 2 * 5 * 80 * 64


def test_a_gate_scales_the_shared_experts(site, make_shape):
    """5 tokens of 128 bytes: one reads the hidden state, one adds two tensors into a third."""
    mlp = experts(shared_intermediate_size=80, shared_gate=True)
    listed = Listed(site(make_model(mlp=mlp)), make_shape([1] * 5))
    assert listed.once("shared_gate", "bytes_moved") == 5 * 128
    assert listed.once("shared_sum", "bytes_moved") == 5 * 3 * 128


def test_experts_are_stored_in_their_own_format(site, make_shape):
    model = make_model(mlp=experts(), moe_weights="mxfp4")
    listed = Listed(site(model), make_shape([1] * 100))
    assert listed.once("experts", "stored_bytes") == 8 * 7680 * (0.5 + 1 / 32)
    assert listed.once("router", "stored_bytes") == 64 * 8 * 2


# Formats, adapters, matrices before the first layer


def test_only_the_matrices_of_layers_are_quantised(site, make_shape):
    listed = Listed(site(make_model(weights="int4_wo")), make_shape([1]))
    assert listed.once("qkv_proj", "stored_bytes") == 64 * 256 * (0.5 + 2.5 / 128)
    assert listed.once("lm_head", "stored_bytes") == 64 * 1000 * 2


def test_matrices_compute_in_their_format_where_the_chip_can(site, make_shape, toy_device):
    with_fp8 = replace(toy_device, peak_flops_per_s={"bf16": 1e15, "fp8": 2e15})
    model = make_model(weights="fp8")
    for device, dtype in ((toy_device, "bf16"), (with_fp8, "fp8")):
        listed = Listed(site(model, device=device), make_shape([1]))
        assert {op.dtype for op in listed.of("qkv_proj")} == {dtype}
        assert {op.dtype for op in listed.of("lm_head")} == {"bf16"}


def test_2_4_sparsity_halves_the_values_and_keeps_two_bits_of_place(site, make_shape, toy_device):
    sparse = make_model(sparsity="2:4")
    listed = Listed(site(sparse), make_shape([1]))
    assert listed.once("qkv_proj", "stored_bytes") == 64 * 256 * 2 * 0.5625
    with_units = replace(toy_device, sparse_tensor_cores=True)
    for device, peak in ((toy_device, 1e15), (with_units, 2e15)):
        _, seen = site(sparse, device=device).stored(Role.dense)
        assert seen.peak_flops_per_s["bf16"] == peak
        _, seen = site(sparse, device=device).stored(Role.plain)
        assert seen.peak_flops_per_s["bf16"] == 1e15


def test_adapters_add_a_shrink_and_an_expand(site, make_shape):
    """Rank 4: 2 x 4 (k + n) FLOPs a token on each matrix; of 3 active adapters a batch of 2 reads 2."""
    listed = Listed(site(lora=Lora(rank=4, num_active=3)), make_shape([1] * 10))
    both_sides = (64 + 256) + (128 + 64) + (64 + 320) + (160 + 64)
    assert listed.total("flops", "lora") == 4 * 10 * 2 * 4 * both_sides
    assert listed.total("stored_bytes", "lora") == 4 * 3 * 4 * both_sides * 2
    few = Listed(site(lora=Lora(rank=4, num_active=3)), make_shape([1] * 2))
    assert few.total("stored_bytes", "lora") == 4 * 2 * 4 * both_sides * 2
    assert listed.calls("lora") == 4 * 4, "one on each matrix of a layer, none on the LM head"


def test_routers_and_experts_have_no_adapters(site, make_shape):
    listed = Listed(site(make_model(mlp=experts()), lora=Lora(rank=4)), make_shape([1]))
    assert listed.calls("lora") == 4 * 2


@pytest.mark.parametrize("setting", ["rank", "num_active"])
def test_rejects_adapters_that_cannot_be(setting):
    with pytest.raises(ValueError, match=f"{setting}=0: must be a whole number >= 1"):
        Lora(**{"rank": 8, setting: 0})


def test_rejects_kernels_of_an_unknown_library():
    with pytest.raises(ValueError, match="library=cutlass: must be vllm or trtllm"):
        Kernels(library="cutlass")


def test_matrices_before_the_first_layer_multiply_every_token(site, make_shape):
    """128 x 64 for two tokens, cut over two ranks by columns; the whole model has all of them."""

    def inputs(ranks):
        return [Matrix("draft_proj", 128, 64 // ranks.tensor)]

    shape = make_shape([1, 1])
    for ranks in (1, 2):
        on = site(tensor_parallel_size=ranks)
        with_inputs, plain = Listed(on, shape, inputs=inputs), Listed(on, shape)
        assert with_inputs.total("flops") - plain.total("flops") == 2 * 2 * 128 * 64 / ranks


# Layouts


EVEN = [
    {"tensor_parallel_size": 4},
    {"tensor_parallel_size": 4, "sequence_parallel": True},
    {"attention_data_parallel_size": 2},
    {"context_parallel_size": 2},
    {"pipeline_parallel_size": 2, "num_micro_batches": 1},
    {"tensor_parallel_size": 2, "attention_data_parallel_size": 2, "context_parallel_size": 2},
]


@pytest.mark.parametrize("layout", EVEN, ids=lambda layout: " ".join(name[:8] for name in layout))
@pytest.mark.parametrize("expert_parallel_size", [None, 1, 2])
def test_the_ranks_of_a_stage_share_the_flops_of_the_model(site, make_shape, layout, expert_parallel_size):
    """Everything divides evenly; the list of a pipeline holds the layers of all stages.

    Left out: the router, which every tensor-parallel rank computes, and what each device of a ring computes:
    the LM head, the projections of decodes.
    """
    model = make_model() if expert_parallel_size is None else make_model(mlp=experts())
    ranks = ParallelLayout(**layout).stage_size
    if expert_parallel_size and ranks % expert_parallel_size == 0:
        layout = {**layout, "expert_parallel_size": expert_parallel_size}
    decodes = [] if "context_parallel_size" in layout else [30] * 8
    shape = make_shape(decodes, [(64, 0)] * 4, completed=False)
    rank, whole = Listed(site(model, **layout), shape), Listed(site(model), shape)
    names = {op.name for op in whole.operators} - {"router", "lm_head"}
    for name in names:
        assert ranks * rank.total("flops", name) == whole.total("flops", name), name
    assert whole.total("flops", *names) > 0


def test_tensor_parallelism_sums_hidden_states_twice_a_layer_and_gathers_logits(site, make_shape):
    """10 tokens of 128 bytes; 4 sampled rows of 4 x 250 logits of 2 bytes."""
    listed = Listed(site(tensor_parallel_size=4), make_shape([5, 6, 7], [(7, 0)]))
    calls = {op.name: op.calls for op in listed.operators if op.is_message}
    assert calls == {
        "embedding_all_reduce": 1,
        "attention_all_reduce": 4,
        "mlp_all_reduce": 4,
        "logits_all_gather": 1,
    }
    for name in ("embedding_all_reduce", "attention_all_reduce", "mlp_all_reduce"):
        assert listed.once(name, "bytes_moved") == 10 * 128
    assert listed.once("logits_all_gather", "bytes_moved") == 4 * 1000 * 2


def test_sequence_parallelism_cuts_norms_and_each_all_reduce_in_two(site, make_shape):
    shape = make_shape([1] * 8)
    plain, cut = (Listed(site(tensor_parallel_size=4, sequence_parallel=sp), shape) for sp in (False, True))
    assert cut.total("bytes_moved", "mlp_norm") == plain.total("bytes_moved", "mlp_norm") / 4
    calls = {op.name: op.calls for op in cut.operators if op.is_message}
    assert calls["attention_reduce_scatter"] == calls["attention_all_gather"] == 4
    assert not any("all_reduce" in name for name in calls)
    assert cut.once("mlp_reduce_scatter", "bytes_moved") == plain.once("mlp_all_reduce", "bytes_moved")


def test_a_micro_batch_passes_all_stages_once(site, make_shape):
    """4 layers in 2 stages: 12 decodes, in halves."""
    listed = Listed(site(pipeline_parallel_size=2), make_shape([9] * 12))
    assert (listed.calls("qkv_proj"), listed.calls("lm_head"), listed.calls("stage_send_recv")) == (4, 1, 1)
    assert listed.batch.tokens == 6
    assert listed.once("stage_send_recv", "bytes_moved") == 6 * 128
    uncut = Listed(site(pipeline_parallel_size=2, num_micro_batches=1), make_shape([9] * 12))
    assert (uncut.calls("qkv_proj"), uncut.batch.tokens) == (4, 12)


def test_a_ring_passes_keys_or_queries_whichever_are_fewer(site, make_shape):
    """Ring of 4. A prompt of 400: keys and values, 400 x 256 bytes; each device sends three quarters of them.
    Behind 100,000 cached tokens: the queries of 400 tokens and their results, 2 x 400 x 256 bytes.
    """
    fresh = Listed(site(context_parallel_size=4), make_shape(chunks=[(400, 0)]))
    behind = Listed(site(context_parallel_size=4), make_shape(chunks=[(400, 100_000)]))
    assert fresh.once("ring_attention", "bytes_moved") == 400 * 256 * 3 / 4
    assert behind.once("ring_attention", "bytes_moved") == 2 * 400 * 256 * 3 / 4


def test_a_ring_sums_the_partial_results_of_decodes(site, make_shape):
    listed = Listed(site(context_parallel_size=4), make_shape([400] * 6))
    assert listed.once("context_all_reduce", "bytes_moved") == 6 * 256
    assert listed.once("attention_decode", "stored_bytes") == 6 * 100 * 256


def test_a_ring_whose_neighbours_are_in_other_nodes_goes_between_nodes(site, make_shape, toy_device):
    """8 tensor-parallel ranks fill a node, so each device's ring of 2 spans two."""
    shape, curve = make_shape([400] * 6, [(400, 0)]), CollectiveCurve()
    model = make_model(grouped(num_kv_heads=8))
    listed = Listed(site(model, tensor_parallel_size=8, context_parallel_size=2), shape)
    for name, price in (("ring_attention", send_recv_seconds), ("context_all_reduce", all_reduce_seconds)):
        size = listed.once(name, "bytes_moved")
        assert listed.once(name, "seconds") == price(size, 2, toy_device, curve, nodes=2)
        assert listed.once(name, "seconds") > price(size, 2, toy_device, curve, nodes=1)


def test_experts_on_other_devices_get_their_tokens_by_all_to_all(site, make_shape):
    """4 attention groups x 2 ranks, 8 decodes a group. Each rank sends half of their copies: 2 x 8 / 2."""
    layout = {"tensor_parallel_size": 2, "attention_data_parallel_size": 4, "expert_parallel_size": 8}
    listed = Listed(site(make_model(mlp=experts()), **layout), make_shape([9] * 32))
    for name in ("expert_dispatch", "expert_combine"):
        assert listed.calls(name) == 4
        assert listed.once(name, "bytes_moved") == 2 * 8 / 2 * 128
    assert listed.of("mlp_all_reduce") == []


def test_a_token_has_no_more_copies_than_devices_with_experts(site, make_shape):
    mlp = experts(top_k=6)
    layout = {"attention_data_parallel_size": 2, "expert_parallel_size": 2}
    listed = Listed(site(make_model(mlp=mlp), **layout), make_shape([9] * 32))
    assert listed.once("expert_dispatch", "bytes_moved") == 2 * 16 * 128


@pytest.mark.parametrize("name", ["attention_data_parallel_size", "context_parallel_size"])
def test_experts_cut_over_all_devices_get_every_token(site, make_shape, name):
    """32 new tokens, 8 on each of 4 devices: gathered, multiplied with a slice of each expert, summed."""
    listed = Listed(site(make_model(mlp=experts()), **{name: 4}), make_shape(chunks=[(8, 0)] * 4))
    assert listed.once("expert_dispatch", "bytes_moved") == 32 * 128
    assert listed.once("expert_combine", "bytes_moved") == 32 * 128
    assert listed.once("experts", "flops") == 2 * 32 * 2 * 7680 / 4
    assert listed.once("experts", "stored_bytes") == 8 * 7680 / 4 * 2


def test_tensor_parallel_experts_need_no_dispatch(site, make_shape):
    listed = Listed(
        site(make_model(mlp=experts()), tensor_parallel_size=4, expert_parallel_size=4), make_shape([9] * 32)
    )
    assert listed.of("expert_dispatch") == []
    assert listed.calls("mlp_all_reduce") == 4


# All of them


def test_every_operator_belongs_to_a_component_and_answers_for_arrays(kind):
    site = Site(calibration=Calibration(), kernels=Kernels(), **kind)
    fields = ([1, 0, 8], [10, 0, 80], [0, 1, 2], [0, 5, 9], [0, 15, 40], [0, 5, 20], [1, 1, 9])
    batch = site.layout.rank_batch(IterationShape(*(np.array(field, dtype=float) for field in fields)))
    for op in iteration_operators(site):
        assert op.component in COMPONENTS
        assert op.calls > 0
        for quantity in (op.seconds, op.flops, op.stored_bytes, op.bytes_moved):
            answers = np.broadcast_to(quantity(batch), (3,))
            assert np.isfinite(answers).all(), op.name
            assert (answers >= 0).all(), op.name
        assert np.all(op.bytes_moved(batch) >= op.stored_bytes(batch)), op.name


def test_what_has_nothing_to_do_takes_no_time(kind, make_shape):
    """Attention to prompts in a batch of decodes, and the other way round."""
    site = Site(calibration=Calibration(), kernels=Kernels(), **kind)
    for per, shape in ((Per.prefill, make_shape([100] * 9)), (Per.decode, make_shape(chunks=[(100, 3)]))):
        batch = site.layout.rank_batch(shape)
        idle = [op for op in iteration_operators(site) if op.per is per]
        assert idle
        for op in idle:
            assert op.seconds(batch) == op.flops(batch) == op.bytes_moved(batch) == 0, op.name
