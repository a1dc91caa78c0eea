"""The decoder's logits against a textbook model in float64, its KV cache in 16, in 8 and in 4 bits."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from kernels.block_copy import copy_blocks_reference
from kernels.launch import compiling_for
from kernels.paged_kv import INT4
from realengine.model.architecture import Architecture
from realengine.model.backend import TORCH, TRITON, check_supported
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.model.quantization import LINEAR_QUANTIZATIONS
from realengine.runner.batch import Batch
from realengine.weights.load import load_weights
from tests.realengine.eager import eager_logits
from tests.realengine.steps import all_logits, batch_of, prompts

torch.set_num_threads(1)

CPU = torch.device("cpu")
LLAMA = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
QWEN2 = LLAMA | {"model_type": "qwen2"}
QWEN3 = LLAMA | {"model_type": "qwen3", "tie_word_embeddings": True}
MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
CONFIGS = {
    "llama": LLAMA,
    "llama3_rope": LLAMA | {"rope_scaling": LLAMA3},
    "mistral": LLAMA | {"model_type": "mistral", "sliding_window": 7},
    "qwen2": QWEN2,
    "qwen2_window_from_layer_1": QWEN2
    | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3": QWEN3,
    "qwen3_moe": LLAMA | MOE | {"mlp_only_layers": [0]},
}


def make(config, dtype=torch.float32, backend=TORCH, std=0.2, **settings):
    """Returns (architecture, weights, decoder); large weights make attention far from uniform."""
    spec = Architecture.from_hf(CONFIGS[config])
    weights = load_weights(None, spec, torch.float32, CPU, seed=1)
    generator = torch.Generator().manual_seed(2)
    for name, weight in weights.items():
        if name.endswith("norm.weight"):
            weight.copy_(1 + 0.3 * torch.randn(weight.shape, generator=generator))
        elif name != "head.weight" or not spec.tie_word_embeddings:
            weight.mul_(std / 0.02)
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    return spec, weights, Decoder(spec, weights, backend, 128, **settings)


def cache_of(spec, dtype=torch.float32, block_size=4, num_blocks=70):
    return KvCache(spec, num_blocks, block_size, dtype, CPU)


def in_8_bits(dtype):
    """Returns a function that rounds a head's vector as a cache of that dtype does."""
    most = 127 if dtype == torch.int8 else 448

    def stored(x):
        scale = x.abs().amax(-1, keepdim=True) / most
        codes = x / scale
        codes = codes.round() if dtype == torch.int8 else codes.float().to(dtype).double()
        return codes * scale

    return stored


def in_4_bits(x):
    """Rounds a head's vector to 16 equal steps from its least number on, both kept in fp16."""
    least = x.amin(-1, keepdim=True).half().double()
    step = ((x.amax(-1, keepdim=True) - least) / 15).half().double()
    return ((x - least) / step).round().clamp(0, 15) * step + least


ROUNDINGS = {
    torch.int8: (in_8_bits(torch.int8), 0.02),
    torch.float8_e4m3fn: (in_8_bits(torch.float8_e4m3fn), 0.08),
    INT4: (in_4_bits, 0.25),
}
"""How a cache of each dtype rounds, and how much that may change the logits."""


@pytest.mark.parametrize("config", CONFIGS)
def test_logits_of_mixed_batches_are_those_of_a_textbook_model(config):
    spec, weights, decoder = make(config)
    sequences = prompts(spec.vocab_size)
    for block_size in (4, 16):
        found = all_logits(decoder, cache_of(spec, block_size=block_size), sequences, seed=block_size)
        for tokens, logits in zip(sequences, found, strict=True):
            expected = eager_logits(spec, weights, torch.tensor(tokens))
            torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


def test_windows_are_those_of_their_layers():
    """With the windows of both layers exchanged, logits would be far off: the test above can fail."""
    spec, weights, _ = make("qwen2_window_from_layer_1")
    tokens = torch.tensor(prompts(97)[2])
    everywhere = Architecture.from_hf(CONFIGS["qwen2_window_from_layer_1"] | {"max_window_layers": 0})
    assert (eager_logits(spec, weights, tokens) - eager_logits(everywhere, weights, tokens)).abs().max() > 0.1


@pytest.mark.parametrize("dtype", ROUNDINGS)
def test_quantised_kv_is_rounded_once_a_token_and_head_and_nowhere_else(dtype):
    spec, weights, decoder = make("qwen3")
    stored, most = ROUNDINGS[dtype]
    sequences = prompts(spec.vocab_size)
    for tokens, logits in zip(sequences, all_logits(decoder, cache_of(spec, dtype), sequences), strict=True):
        plain = eager_logits(spec, weights, torch.tensor(tokens))
        expected = eager_logits(spec, weights, torch.tensor(tokens), stored=stored)
        off = (logits.double() - expected).norm() / plain.norm()
        rounding = (expected - plain).norm() / plain.norm()
        assert off < 0.1 * rounding or off < 1e-5  # a few codes fall on the other side of a tie
        assert rounding < most


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn, INT4])
def test_a_block_takes_the_bytes_that_are_said(dtype):
    spec = Architecture.from_hf(LLAMA)
    for world_size in (1, 2):
        cache = KvCache(spec, 9, 4, dtype, CPU, world_size)
        held = sum(x.nbytes for layer in cache.layers.values() for x in layer if x is not None)
        assert held == 10 * KvCache.bytes_per_block(spec, 4, dtype, world_size)
    # 2 layers of 2 KV heads of 16 keys and 16 values, 4 tokens
    assert KvCache.bytes_per_block(spec, 4, torch.float16) == 2 * 2 * 32 * 4 * 2
    assert KvCache.bytes_per_block(spec, 4, INT4) == 2 * 2 * 2 * (8 + 4) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn, INT4])
def test_a_copied_block_is_as_good_as_the_first(dtype):
    """The cache's sets hold everything that a block needs: its scales, too."""
    spec, _, decoder = make("llama")
    cache = cache_of(spec, dtype)
    (tokens,) = prompts(spec.vocab_size, lengths=(8,))
    tables = torch.tensor([[3, 5]], dtype=torch.int32)
    decoder.logits(batch_of([(0, 0, 7)], [tokens], tables, 4), cache)
    expected = decoder.logits(batch_of([(0, 7, 1)], [tokens], tables, 4), cache)
    for caches in cache.cache_sets:
        copy_blocks_reference(caches, torch.tensor([[3, 8], [5, 9]]))
        for x in caches.tensors:
            x[[3, 5]] = x[[1, 1]]
    copied = torch.tensor([[8, 9]], dtype=torch.int32)
    assert torch.equal(decoder.logits(batch_of([(0, 7, 1)], [tokens], copied, 4), cache), expected)


@pytest.mark.sampled(fast=2, slow=4)
@pytest.mark.parametrize("config", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.int8, INT4])
def test_triton_computes_what_torch_does(config, kv_dtype):
    """In the interpreter, where fp16 is right and bf16 is not."""
    spec, weights, reference = make(config, torch.float16, std=0.1)
    decoder = Decoder(spec, weights, TRITON, 128)
    sequences = prompts(spec.vocab_size, lengths=(1, 6, 9))
    found = all_logits(decoder, cache_of(spec, kv_dtype), sequences, most=5)
    expected = all_logits(reference, cache_of(spec, kv_dtype), sequences, most=5)
    for a, b in zip(found, expected, strict=True):
        assert (a - b).float().norm() < 1e-2 * b.float().norm()


@pytest.mark.parametrize(
    ("config", "quantization"),
    [("llama", name) for name in (None, *LINEAR_QUANTIZATIONS)]
    + [("qwen3_moe", None), ("qwen3_moe", "w8a16")],
)
def test_a_decode_step_reads_nothing_back_to_the_host(config, quantization):
    """A CUDA graph could not read back: fake tensors have no values, and reading one raises."""
    spec = Architecture.from_hf(CONFIGS[config])
    launched = []
    with FakeTensorMode(), compiling_for("sm_90", lambda kernel, *_: launched.append(kernel.__name__)):
        weights = load_weights(None, spec, torch.float16, CPU, quantization=quantization)
        decoder = Decoder(spec, weights, TRITON, 128)
        cache = cache_of(spec, torch.int8)
        num_rows = 3
        batch = Batch(
            tokens_T=torch.zeros(num_rows, dtype=torch.int64),
            positions_T=torch.zeros(num_rows, dtype=torch.int64),
            slots_T=torch.zeros(num_rows, dtype=torch.int64),
            block_tables_BM=torch.zeros(num_rows, 8, dtype=torch.int32),
            chunk_starts=torch.zeros(1, dtype=torch.int32),
            context_lens_B=torch.zeros(num_rows, dtype=torch.int32),
            sampled_rows_S=None,
            num_decodes=num_rows,
            max_query_len=0,
            max_context_len=32,
        )
        launched.clear()
        assert decoder.logits(batch, cache).shape == (num_rows, spec.vocab_size)
        with pytest.raises(DataDependentOutputException):
            decoder._layers[0].attention_norm.sum().item()
    kernels = {
        None: set(),
        "w4a16": {"w4a16_kernel"},
        "w8a16": {"scaled_gemm_kernel"},
        "int8": {"scaled_gemm_kernel", "quantise_tokens_kernel"},
        "fp8": {"scaled_gemm_kernel", "quantise_tokens_kernel"},
    }
    assert kernels[quantization] <= set(launched)
    assert ("moe_gemm_kernel" in launched) == (config == "qwen3_moe")


def supported(fields, chip, backend=TRITON, dtype=torch.bfloat16, kv_dtype=None, **settings):
    """Raises as check_supported does for that chip."""
    spec = Architecture.from_hf(LLAMA | fields)
    with compiling_for(chip, lambda *_: None):
        check_supported(spec, backend, dtype, kv_dtype or dtype, **settings)


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"head_dim": 24}, {}, "head_dim=24: the Triton kernels support multiples of 16 up to 256"),
        ({"head_dim": 272}, {}, "head_dim=272"),
        ({"hidden_size": 40000}, {}, "hidden_size=40000: the Triton kernels support up to 32768"),
        (
            {"num_attention_heads": 512, "num_key_value_heads": 1, "head_dim": 128},
            {},
            "query heads per KV head",
        ),
        ({}, {"quantization": "w4a16", "dtype": torch.float32}, "dtype=torch.float32: quantization=w4a16"),
        (MOE, {"dtype": torch.float32}, "dtype=torch.float32: a mixture of experts needs"),
        (MOE | {"num_experts": 513}, {}, "of num_experts=513: the Triton kernels support up to 32 of 512"),
        (MOE, {"quantization": "w4a16"}, "quantization=w4a16: experts.*use w8a16, mxfp4 or None"),
        (
            {"intermediate_size": 60},
            {"quantization": "w4a16"},
            "down: has 60 inputs.*multiples of 16, w8a16 any",
        ),
        ({}, {"quantization": "w4a16", "world_size": 4}, "o: has 24 inputs"),
        ({}, {"quantization": "int4"}, "quantization=int4: must be None or one of w4a16, w8a16, int8, fp8"),
        ({}, {"quantization": "fp8", "chip": "sm_80"}, "needs sm_89 or later, this is sm_80; use torch.int8"),
        (
            {},
            {"kv_dtype": torch.float8_e4m3fn, "chip": "sm_86"},
            "kv_cache_dtype=fp8: needs sm_89.*this is sm_86; int8",
        ),
        (
            {"head_dim": 18},
            {"kv_dtype": INT4},
            "kv_cache_dtype=int4: .*its 18 rotated numbers a multiple of 4; choose int8",
        ),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}},
            {"quantization": "fp8"},
            "quantization=fp8: the checkpoint is packed by awq, which is w4a16; remove the setting",
        ),
    ],
)
def test_what_the_kernels_do_not_take_is_said_before_the_weights_are_loaded(fields, settings, message):
    with pytest.raises(ValueError, match=message):
        supported(fields, settings.pop("chip", "sm_90"), **settings)


def test_what_the_kernels_take_is_not_refused():
    """The last of these differs from the one before it by its backend only, and is refused."""
    wide = {"head_dim": 24, "hidden_size": 40000}
    supported({}, "sm_80", kv_dtype=torch.int8, quantization="int8")
    supported({}, "sm_90", kv_dtype=torch.float8_e4m3fn, quantization="fp8")
    supported(MOE, "sm_80", quantization="w8a16")
    supported(MOE, "interpreter", TORCH, torch.float32, quantization="w8a16")
    supported(wide, "interpreter", TORCH, torch.float32)
    with pytest.raises(ValueError, match="head_dim=24: the Triton kernels support"):
        supported(wide, "interpreter", TRITON, torch.float32)
