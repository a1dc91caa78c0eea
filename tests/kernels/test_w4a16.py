"""W4A16: both checkpoint layouts against the formula of their papers, the GEMM against its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.int4_weight import Int4Weight, dense_reference, from_awq, from_gptq, quantise_int4
from kernels.w4a16 import DENSE_ROWS, dense, w4a16_gemm, w4a16_gemm_reference

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def drawn(generator, n, k, group_size):
    """Nibbles [N, K], scales fp16 [G, N], zeros [G, N], and the weight they stand for."""
    groups = -(-k // group_size)
    nibbles = torch.randint(0, 16, (n, k), generator=generator)
    scales = (torch.rand(groups, n, generator=generator) * 0.1 + 0.01).half()
    zeros = torch.randint(1, 16, (groups, n), generator=generator)
    group = torch.arange(k) // group_size
    weight = (nibbles - zeros[group].T) * scales[group].T.float()
    return nibbles, scales, zeros, weight


def packed(values, order, dim):
    """Packs eight nibbles a word along dim, values[order[i]] at bit 4 * i."""
    values = values.movedim(dim, -1)
    eights = values.reshape(*values.shape[:-1], -1, 8)
    word = sum(eights[..., order[i]] << (4 * i) for i in range(8))
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32).movedim(-1, dim)


def guarded_weight(guarded, weight):
    words, scales, zeros, *rest = weight
    return Int4Weight(guarded(words), guarded(scales), guarded(zeros), *rest)


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_awq_checkpoint_means_what_its_formula_says(generator, group_size):
    n, k = 40, 256
    nibbles, scales, zeros, weight = drawn(generator(0), n, k, k if group_size == -1 else group_size)
    converted = from_awq(
        packed(nibbles.T, AWQ_ORDER, 1), packed(zeros, AWQ_ORDER, 1), scales, group_size=group_size
    )
    torch.testing.assert_close(dense_reference(converted, torch.float32), weight)


@pytest.mark.parametrize("less_one", [True, False])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_gptq_checkpoint_means_what_its_formula_says(generator, group_size, less_one):
    n, k = 24, 192 if group_size in (32, 64) else 256
    nibbles, scales, zeros, weight = drawn(generator(1), n, k, k if group_size == -1 else group_size)
    converted = from_gptq(
        packed(nibbles.T, range(8), 0),
        packed(zeros - int(less_one), range(8), 1),
        scales,
        torch.arange(k) // (k if group_size == -1 else group_size),
        group_size=group_size,
        zeros_less_one=less_one,
    )
    assert converted.order_K is None
    torch.testing.assert_close(dense_reference(converted, torch.float32), weight)


def test_gptq_inputs_in_another_order(generator, assert_close):
    n, k, group_size = 32, 128, 32
    nibbles, scales, zeros, _ = drawn(generator(2), n, k, group_size)
    g_idx = (torch.arange(k) // group_size)[torch.randperm(k, generator=generator(3))]
    weight = (nibbles - zeros[g_idx].T) * scales[g_idx].T.float()
    converted = from_gptq(
        packed(nibbles.T, range(8), 0),
        packed(zeros - 1, range(8), 1),
        scales,
        g_idx.to(torch.int32),
        group_size=group_size,
    )
    x = torch.randn(3, k, generator=generator(4)).half()
    expected = (x.float() @ weight.T).half()
    assert_close(w4a16_gemm_reference(x, converted), expected, terms=k)
    assert_close(w4a16_gemm(x, converted), expected, terms=k)
    with pytest.raises(ValueError, match="each group must have 32 inputs"):
        from_gptq(
            packed(nibbles.T, range(8), 0),
            packed(zeros - 1, range(8), 1),
            scales,
            torch.tensor([3, *range(k - 1)]) // group_size,
            group_size=group_size,
        )


@settings(max_examples=12)
@given(
    m=st.sampled_from([1, 2, 15, 16, 17, 33, 65]),
    n=st.sampled_from([8, 31, 32, 72]),
    k=st.sampled_from([32, 96, 128, 144, 400]),
    group_size=st.sampled_from([32, 64, 128]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    num_splits=st.sampled_from([None, 1, 2, 3]),
    with_bias=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_gemm_equals_reference(
    guarded, generator, assert_close, m, n, k, group_size, dtype, num_splits, with_bias, seed
):
    random = generator(seed)
    weight = quantise_int4(torch.randn(n, k, generator=random), group_size)
    wide = torch.full((m, k + 16), torch.nan, dtype=dtype)  # rows apart, NaN between them
    wide[:, :k] = torch.randn(m, k, generator=random).to(dtype)
    x = guarded(wide)[:, :k]
    bias = guarded(torch.randn(n, generator=random).to(dtype)) if with_bias else None
    actual = w4a16_gemm(x, guarded_weight(guarded, weight), bias, num_splits=num_splits)
    assert_close(actual, w4a16_gemm_reference(x, weight, bias), terms=k)


def test_weights_are_not_rounded(generator):
    """fp16 magic adds 1024 to every nibble and takes it away again: not at the cost of fp16 accuracy."""
    weight = quantise_int4(torch.randn(32, 1024, generator=generator(0)), 128)
    x = (torch.rand(4, 1024, generator=generator(1)) + 0.5).half()  # no cancelling signs: the worst case
    exact = x.double() @ dense_reference(weight, torch.float64).T
    assert (w4a16_gemm(x, weight).double() - exact).abs().max() <= 2e-3 * exact.abs().max()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("n", "k", "group_size"), [(70, 144, 32), (64, 256, 128)])
def test_dense_equals_reference(guarded, generator, assert_close, dtype, n, k, group_size):
    weight = quantise_int4(torch.randn(n, k, generator=generator(5)), group_size)
    assert_close(dense(guarded_weight(guarded, weight), dtype), dense_reference(weight, dtype))


def test_many_rows_take_the_dense_path(generator, assert_close):
    weight = quantise_int4(torch.randn(16, 64, generator=generator(6)), 32)
    x = torch.randn(DENSE_ROWS, 64, generator=generator(7)).half()
    assert_close(w4a16_gemm(x, weight), w4a16_gemm_reference(x, weight), terms=64)


def test_a_row_does_not_depend_on_the_rows_beside_it(generator):
    weight = quantise_int4(torch.randn(64, 512, generator=generator(8)), 128)
    x = torch.randn(16, 512, generator=generator(9)).half()
    assert torch.equal(w4a16_gemm(x, weight)[3], w4a16_gemm(x[3:4], weight)[0])


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_quantising_is_within_half_a_step(generator, group_size):
    weight = torch.randn(24, 256, generator=generator(10))
    error = (dense_reference(quantise_int4(weight, group_size), torch.float32) - weight).abs()
    grouped = weight.view(24, -1, group_size)
    step = (grouped.amax(-1).clamp(min=0) - grouped.amin(-1).clamp(max=0)) / 15
    assert bool(
        (error.view_as(grouped) <= 1.02 * step[..., None]).all()
    )  # half each of weight and zero point
    assert float(error.mean()) < 0.3 * float(step.mean())


def test_refusals(generator):
    weight = quantise_int4(torch.randn(8, 128, generator=generator(11)), 64)
    with pytest.raises(ValueError, match=r"x is torch.float32; must be one of torch.bfloat16, torch.float16"):
        w4a16_gemm(torch.zeros(1, 128), weight)
    with pytest.raises(ValueError, match=r"x is \[1, 64\]; must be \[M, 128\]"):
        w4a16_gemm(torch.zeros(1, 64).half(), weight)
    with pytest.raises(ValueError, match="group size 16: must be 32, 64"):
        quantise_int4(torch.randn(8, 128), 16)
    with pytest.raises(ValueError, match="must be a multiple of 16"):
        quantise_int4(torch.randn(8, 100), 32)
    with pytest.raises(ValueError, match=r"bias is \[7\]"):
        w4a16_gemm(torch.zeros(1, 128).half(), weight, torch.zeros(7))
    with pytest.raises(ValueError, match=r"must be \[2, 8\] and \[2, 1\]"):
        from_awq(
            torch.zeros(128, 1, dtype=torch.int32),
            torch.zeros(1, 1, dtype=torch.int32),
            torch.zeros(1, 8),
            group_size=64,
        )


def test_no_rows():
    weight = quantise_int4(torch.randn(8, 128), 64)
    assert w4a16_gemm(torch.zeros(0, 128).half(), weight).shape == (0, 8)
