"""Weights quantised on load: which ones, their error, one at a time; logits of the quantised models."""

import weakref
from functools import partial

import pytest
import torch

from kernels.int4_weight import Int4Weight
from kernels.w8a8 import ScaledTensor
from kernels.w8a16 import Int8Weight
from realengine.model import quantization as module
from realengine.model.architecture import Architecture
from realengine.model.backend import TORCH
from realengine.model.decoder import Decoder
from realengine.model.kv_cache import KvCache
from realengine.model.quantization import LINEAR_QUANTIZATIONS, concatenated, quantised
from realengine.weights import load
from realengine.weights.load import load_weights
from tests.realengine.eager import dense, eager_logits
from tests.realengine.model.test_decoder import CONFIGS, CPU, make
from tests.realengine.model.test_linear import in_8_bits
from tests.realengine.steps import all_logits, prompts

TYPES = {"w4a16": Int4Weight, "w8a16": Int8Weight, "int8": ScaledTensor, "fp8": ScaledTensor}
NAME = "layers.0.gate_up.weight"


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded_model(config, quantization, std=0.2):
    """Returns (architecture, plain weights, rounded weights, decoder of the rounded weights)."""
    spec, plain, _ = make(config, std=std)
    weights = {name: quantised(name, weight, quantization) for name, weight in plain.items()}
    return spec, plain, weights, Decoder(spec, weights, TORCH, 128)


@pytest.mark.parametrize("quantization", LINEAR_QUANTIZATIONS)
def test_every_linear_layer_of_the_blocks_is_rounded_and_nothing_else(quantization):
    weights = load_weights(
        None, Architecture.from_hf(CONFIGS["qwen3"]), torch.float32, CPU, quantization=quantization
    )
    linear = {f"layers.{i}.{of}.weight" for i in range(2) for of in ("qkv", "o", "gate_up", "down")}
    assert {name for name, weight in weights.items() if not isinstance(weight, torch.Tensor)} == linear
    assert {type(weights[name]) for name in linear} == {TYPES[quantization]}
    assert (
        weights["layers.0.o.weight"][0].dtype
        == {
            "w4a16": torch.int32,
            "w8a16": torch.int8,
            "int8": torch.int8,
            "fp8": torch.float8_e4m3fn,
        }[quantization]
    )


def test_experts_are_rounded_to_int8_one_by_one():
    name = "layers.0.experts_gate_up.weight"
    weight = random(3, 8, 16) * torch.tensor([1.0, 100.0, 0.01])[:, None, None]
    rounded = quantised(name, weight, "w8a16")
    assert rounded[0].shape == (3, 8, 16)
    assert rounded[1].shape == (3, 8)
    torch.testing.assert_close(rounded[1].double(), weight.double().abs().amax(-1) / 127)
    assert ((dense(rounded) - weight).abs() <= rounded[1][..., None].double() / 2 * 1.001).all()


@pytest.mark.parametrize(
    ("quantization", "num_inputs", "half_step"),
    # Half a step between two codes, of a group's range or a row's largest magnitude.
    [("w4a16", 80, 0.5 / 15), ("w4a16", 256, 0.5 / 15), ("w8a16", 33, 0.5 / 127), ("int8", 33, 0.5 / 127)],
)
def test_a_weight_is_rounded_to_the_nearest(quantization, num_inputs, half_step):
    weight = random(40, num_inputs)
    held = quantised(NAME, weight, quantization)
    rounded = dense(held)
    if quantization == "w4a16":
        size = 128 if num_inputs == 256 else 32
        assert held.group_size == size
        padded = torch.nn.functional.pad(weight, (0, -num_inputs % size)).view(40, -1, size)
        span = padded.amax(-1).clamp(min=0) - padded.amin(-1).clamp(max=0)
        span = span.repeat_interleave(size, 1)[:, :num_inputs]
        # The zero point is a code itself, so that the range's ends may lie half a step further out.
        allowed = span * half_step * 2.01
    else:
        allowed = weight.abs().amax(1, keepdim=True) * half_step * 1.001
    assert ((rounded - weight).abs() <= allowed).all()
    assert (rounded - weight).abs().max() > 0.2 * allowed.max()


def test_fp8_keeps_three_bits_behind_the_first():
    weight = random(40, 33)
    rounded = dense(quantised(NAME, weight, "fp8"))
    normal = weight.abs() > weight.abs().amax(1, keepdim=True) / 448 * 2**-6
    assert ((rounded - weight).abs() <= weight.abs() * 2**-4 * 1.001)[normal].all()


@pytest.mark.parametrize("quantization", LINEAR_QUANTIZATIONS)
def test_rows_rounded_a_slice_at_a_time_are_the_same(quantization, monkeypatch):
    weight = random(50, 64)
    whole = quantised(NAME, weight, quantization)
    monkeypatch.setattr(module, "ELEMENTS_AT_ONCE", 7 * 64)
    sliced = quantised(NAME, weight, quantization)
    for a, b in zip(whole, sliced, strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_only_one_weight_is_unrounded_at_a_time(monkeypatch):
    """A model of which all weights do not fit in 16 bits at once can be loaded in 4."""
    live = weakref.WeakSet()
    most = []
    make_random = load.random_weight

    def counting(weight, *args, **settings):
        most.append(len(live))
        made = make_random(weight, *args, **settings)
        if module.is_linear(weight.name):
            live.add(made)
        return made

    monkeypatch.setattr(load, "random_weight", counting)
    spec = Architecture.from_hf(CONFIGS["llama"])
    load_weights(None, spec, torch.float32, CPU, quantization="w4a16")
    assert len(most) > 8
    assert max(most) == 0
    most.clear()
    plain = load_weights(None, spec, torch.float32, CPU)
    assert max(most) == 8  # unrounded, they are all kept; behind the last of them come norm and head
    del plain


def test_joined_weights_give_the_outputs_one_behind_the_other():
    parts = [quantised(NAME, random(n, 64, seed=n), "w4a16") for n in (16, 8)]
    assert torch.equal(dense(concatenated(parts)), torch.cat([dense(part) for part in parts]))


@pytest.mark.parametrize("config", ["llama", "qwen2"])
@pytest.mark.parametrize("quantization", ["w4a16", "w8a16"])
def test_logits_are_those_of_the_rounded_weights_exactly(config, quantization):
    spec, _, weights, decoder = rounded_model(config, quantization)
    sequences = prompts(spec.vocab_size)
    cache = KvCache(spec, 70, 4, torch.float32, CPU)
    for tokens, logits in zip(sequences, all_logits(decoder, cache, sequences), strict=True):
        expected = eager_logits(spec, weights, torch.tensor(tokens))
        torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", ["int8", "fp8"])
def test_of_activations_each_token_is_rounded_at_every_linear_layer_and_nowhere_else(quantization):
    spec, _, weights, decoder = rounded_model("llama", quantization, std=0.1)
    sequences = prompts(spec.vocab_size)
    found = torch.cat(all_logits(decoder, KvCache(spec, 70, 4, torch.float32, CPU), sequences)).double()

    def of(rounded):
        return torch.cat([eager_logits(spec, weights, torch.tensor(tokens), rounded) for tokens in sequences])

    plain, expected = of(lambda x: x), of(partial(in_8_bits, quantization=quantization))
    # A few codes fall on the other side of a tie.
    assert (found - expected).norm() < 0.2 * (expected - plain).norm()


@pytest.mark.parametrize(
    ("quantization", "bound"), [("w8a16", 0.025), ("int8", 0.03), ("fp8", 0.1), ("w4a16", 0.3)]
)
def test_rounding_moves_the_logits_by_little(quantization, bound):
    """Random weights: trained ones are rounded no worse, but their outliers are."""
    spec, plain, _, decoder = rounded_model("llama", quantization, std=0.1)
    sequences = prompts(spec.vocab_size)
    cache = KvCache(spec, 70, 4, torch.float32, CPU)
    found = torch.cat(all_logits(decoder, cache, sequences)).double()
    expected = torch.cat([eager_logits(spec, plain, torch.tensor(tokens)) for tokens in sequences])
    off = (found - expected).norm() / expected.norm()
    assert bound / 10 < off < bound


def test_errors_name_the_layer_and_what_is_allowed():
    with pytest.raises(
        ValueError, match=r"layers\.0\.down\.weight: has 60 inputs; .*multiples of 16, w8a16 any"
    ):
        load_weights(
            None,
            Architecture.from_hf(CONFIGS["llama"] | {"intermediate_size": 60}),
            torch.float32,
            CPU,
            quantization="w4a16",
        )
    with pytest.raises(ValueError, match="quantization=w3: must be None or one of w4a16, w8a16, int8, fp8"):
        load_weights(None, Architecture.from_hf(CONFIGS["llama"]), torch.float32, CPU, quantization="w3")
