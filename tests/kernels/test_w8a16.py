"""W8A16: the GEMM against its reference on odd shapes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.w8a16 import Int8Weight, quantise_int8, w8a16_gemm, w8a16_gemm_reference


@settings(max_examples=14)
@given(
    m=st.sampled_from([1, 3, 16, 17, 40, 70]),
    n=st.sampled_from([1, 31, 32, 65]),
    k=st.sampled_from([16, 63, 64, 65, 200]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    num_splits=st.sampled_from([None, 1, 2, 3]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_gemm_equals_reference(guarded, generator, assert_close, m, n, k, dtype, num_splits, with_bias, seed):
    random = generator(seed)
    values, scales = quantise_int8(torch.randn(n, k, generator=random))
    weight = Int8Weight(guarded(values), guarded(scales))
    wide = torch.full((m, k + 8), torch.nan, dtype=dtype)
    wide[:, :k] = torch.randn(m, k, generator=random).to(dtype)
    x = guarded(wide)[:, :k]
    bias = guarded(torch.randn(n, generator=random)) if with_bias else None
    actual = w8a16_gemm(x, weight, bias, num_splits=num_splits)
    assert_close(actual, w8a16_gemm_reference(x, weight, bias), terms=k)


def test_a_row_does_not_depend_on_the_rows_beside_it(generator):
    weight = quantise_int8(torch.randn(64, 512, generator=generator(0)))
    x = torch.randn(16, 512, generator=generator(1)).half()
    assert torch.equal(w8a16_gemm(x, weight)[5], w8a16_gemm(x[5:6], weight)[0])


def test_quantising_is_within_half_a_step(generator):
    weight = torch.randn(16, 100, generator=generator(2))
    values, scales = quantise_int8(weight)
    assert int(values.abs().amax(dim=1).min()) == 127
    assert bool(((values * scales[:, None] - weight).abs() <= 0.501 * scales[:, None]).all())
    assert bool((quantise_int8(torch.zeros(2, 16)).values_NK == 0).all())


def test_refusals():
    weight = quantise_int8(torch.randn(8, 64))
    with pytest.raises(ValueError, match=r"x is torch.float32; must be one of torch.bfloat16, torch.float16"):
        w8a16_gemm(torch.zeros(1, 64), weight)
    with pytest.raises(ValueError, match=r"must be contiguous int8"):
        w8a16_gemm(torch.zeros(1, 64).half(), Int8Weight(weight.values_NK.float(), weight.scales_N))
    with pytest.raises(ValueError, match=r"must be torch.float32 \[8\]"):
        w8a16_gemm(torch.zeros(1, 64).half(), Int8Weight(weight.values_NK, weight.scales_N[:4]))
    with pytest.raises(ValueError, match="must be contiguous"):
        w8a16_gemm(torch.zeros(64, 2).half().T, weight)
