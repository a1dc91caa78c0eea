"""The operators of an iteration: calls, FLOPs and bytes of dense layers, formats and adapters."""

from dataclasses import replace

import numpy as np
import pytest

from hwmodels.assembly import iteration_operators
from hwmodels.assembly.site import Kernels, Site
from hwmodels.iterations import COMPONENTS, IterationShape
from hwmodels.iterations.ops import Per
from hwmodels.model import Block, DenseMlp, Role
from hwmodels.model.weights import Lora, Matrix
from hwmodels.operators import Calibration
from tests.hwmodels.assembly.listed import Listed, grouped, make_model


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


@pytest.mark.parametrize("setting", ["rank", "num_active"])
def test_rejects_adapters_that_cannot_be(setting):
    with pytest.raises(ValueError, match=f"{setting}=0: must be (a whole number )?>= 1"):
        Lora(**{"rank": 8, setting: 0})


def test_rejects_kernels_of_an_unknown_library():
    with pytest.raises(ValueError, match="library=cutlass: must be one of vllm, trtllm"):
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
