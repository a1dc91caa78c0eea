"""Linear layers: each kind against its formula in float64, on both backends."""

import pytest
import torch

from realengine.model.backend import TORCH, TRITON
from realengine.model.linear import W4A16, W8A8, W8A16, Dense, head_logits, make_linear
from realengine.model.quantization import LINEAR_QUANTIZATIONS, quantised
from tests.realengine.eager import dense

torch.set_num_threads(1)

KINDS = {None: Dense, "w4a16": W4A16, "w8a16": W8A16, "int8": W8A8, "fp8": W8A8}
NAME = "layers.0.down.weight"


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def in_8_bits(x, quantization):
    """Rounds each token to the 8-bit type, scaled by its largest magnitude, and back."""
    most = 127 if quantization == "int8" else 448
    scale = x.double().abs().amax(-1, keepdim=True) / most
    codes = x.double() / scale
    return (
        codes.round() if quantization == "int8" else codes.float().to(torch.float8_e4m3fn).double()
    ) * scale


@pytest.mark.parametrize("quantization", [None, *LINEAR_QUANTIZATIONS])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7])
def test_a_layer_is_the_product_with_its_rounded_weight(quantization, has_bias, num_tokens):
    weight = quantised(NAME, random(24, 80), quantization)
    bias = random(24, seed=1) if has_bias else None
    layer = make_linear(weight, bias, TORCH)
    assert type(layer) is KINDS[quantization]
    x = random(num_tokens, 80, seed=2)
    seen = in_8_bits(x, quantization) if quantization in ("int8", "fp8") else x.double()
    expected = seen @ dense(weight).T + (bias.double() if has_bias else 0)
    assert layer(x).dtype == torch.float32
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("quantization", ["w4a16", "w8a16", "int8"])
def test_triton_computes_what_torch_does(quantization):
    """In fp16: the interpreter computes neither bf16 nor FP8 rightly (tests/kernels mends it)."""
    weight, bias = quantised(NAME, random(24, 80), quantization), random(24, seed=1).half()
    x = random(7, 80, seed=2).half()
    found = make_linear(weight, bias, TRITON)(x)
    expected = make_linear(weight, bias, TORCH)(x)
    assert (found - expected).float().norm() < 5e-3 * expected.float().norm()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 8, 9, 40])
def test_logits_of_a_head_are_one_product_for_any_number_of_rows(num_tokens):
    hidden, weight = torch.randn(num_tokens, 24), torch.randn(50, 24)
    found = head_logits(hidden, weight)
    assert found.is_contiguous()
    torch.testing.assert_close(found, hidden @ weight.T)
