"""W8A8: activations' quantisation and the GEMM against their references, FP8 and INT8."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.launch import compiling_for
from kernels.w8a8 import (
    FP8,
    ScaledTensor,
    quantise_tokens,
    quantise_tokens_reference,
    w8a8_gemm,
    w8a8_gemm_reference,
)

KINDS = [FP8, torch.int8]


@settings(max_examples=14)
@given(
    m=st.sampled_from([1, 3, 16, 17, 40, 70]),
    n=st.sampled_from([1, 31, 32, 65]),
    k=st.sampled_from([16, 63, 64, 65, 200]),
    kind=st.sampled_from(KINDS),
    out_dtype=st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    num_splits=st.sampled_from([None, 1, 3]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_gemm_equals_reference(
    guarded, generator, assert_close, m, n, k, kind, out_dtype, num_splits, with_bias, seed
):
    random = generator(seed)
    x, weight = (
        ScaledTensor(*map(guarded, quantise_tokens_reference(torch.randn(rows, k, generator=random), kind)))
        for rows in (m, n)
    )
    bias = guarded(torch.randn(n, generator=random)) if with_bias else None
    actual = w8a8_gemm(x, weight, bias, out_dtype=out_dtype, num_splits=num_splits)
    assert_close(actual, w8a8_gemm_reference(x, weight, bias, out_dtype=out_dtype), terms=k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "k"), [(1, 1), (3, 100), (2, 4097)])
def test_tokens_are_quantised_as_the_reference_does(guarded, generator, dtype, kind, m, k):
    wide = torch.full((m, k + 3), torch.nan, dtype=dtype)
    wide[:, :k] = torch.randn(m, k, generator=generator(k)).to(dtype) * 3
    x = guarded(wide)[:, :k]
    (values, scales), expected = quantise_tokens(x, kind), quantise_tokens_reference(x, kind)
    torch.testing.assert_close(scales, expected.scales_R, rtol=1e-6, atol=0)
    if kind == torch.int8:
        assert torch.equal(values, expected.values_RK)
    else:  # the interpreter rounds some numbers to the other neighbour: one step of 1/8 of the value
        assert bool(
            (values.view(torch.int8).int() - expected.values_RK.view(torch.int8).int()).abs().max() <= 1
        )
        torch.testing.assert_close(values.float(), expected.values_RK.float(), rtol=0.13, atol=2**-9)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_zeros(kind):
    x = torch.zeros(2, 32)
    x[1] = 1
    values, scales = quantise_tokens(x, kind)
    assert bool((values[0].float() == 0).all())
    assert float(values[1, 0].float() * scales[1]) == pytest.approx(1)
    assert bool(torch.isfinite(scales).all())


def test_halves_are_rounded_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5]])
    assert quantise_tokens(x, torch.int8).values_RK.tolist() == [[127, 0, 2, 2, 0, -2]]


def test_integer_sums_are_exact(generator):
    """Sums beyond fp32's 24 bits: an int32 accumulator keeps them until the end."""
    k = 2048
    ones = torch.ones(1, dtype=torch.float32)
    x = ScaledTensor(torch.full((1, k), 127, dtype=torch.int8), ones)
    weight = torch.full((1, k), 127, dtype=torch.int8)
    weight[0, -1] = 126
    actual = w8a8_gemm(x, ScaledTensor(weight, ones), out_dtype=torch.float32, num_splits=1)
    assert actual.item() == float(torch.tensor(127 * 127 * k - 127, dtype=torch.float32))


def test_refusals():
    x = quantise_tokens_reference(torch.randn(2, 32), torch.int8)
    fp8 = quantise_tokens_reference(torch.randn(2, 32), FP8)
    with pytest.raises(ValueError, match=r"x is torch.int8; must be one of torch.float8_e4m3fn"):
        w8a8_gemm(x, fp8)
    with pytest.raises(ValueError, match=r"torch.float8_e5m2: must be one of"):
        quantise_tokens(torch.randn(2, 32), torch.float8_e5m2)
    with pytest.raises(ValueError, match=r"out_dtype is torch.int8"):
        w8a8_gemm(x, x, out_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"scales of x"):
        w8a8_gemm(ScaledTensor(x.values_RK, x.scales_R[:1]), x)
    with compiling_for("sm_80", lambda *launched: None):
        with pytest.raises(ValueError, match=r"needs sm_89 or later, this is sm_80; use torch.int8"):
            w8a8_gemm(fp8, fp8)
        w8a8_gemm(x, x)
