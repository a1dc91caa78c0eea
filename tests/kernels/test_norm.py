from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.norm import (
    add_rms_norm,
    add_rms_norm_reference,
    qk_norm,
    qk_norm_reference,
    rms_norm,
    rms_norm_reference,
)

DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
SIZES = st.sampled_from([1, 2, 63, 64, 65, 100, 576])


@settings(max_examples=15)
@given(num_tokens=st.integers(1, 4), hidden=SIZES, dtype=DTYPES, seed=st.integers(0, 99))
def test_rms_norm_matches_reference(num_tokens, hidden, dtype, seed, generator, guarded, assert_close):
    random = generator(seed)
    x = guarded(3 * torch.randn(num_tokens, hidden, generator=random).to(dtype))
    weight = guarded(torch.randn(hidden, generator=random).to(dtype))
    assert_close(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5))


@settings(max_examples=15)
@given(
    num_tokens=st.integers(1, 4), hidden=SIZES, dtype=DTYPES, seed=st.integers(0, 99), in_place=st.booleans()
)
def test_add_rms_norm_matches_reference(
    num_tokens, hidden, dtype, seed, in_place, generator, guarded, assert_close
):
    random = generator(seed)
    x = guarded(torch.randn(num_tokens, hidden, generator=random).to(dtype))
    residual = guarded(5 * torch.randn(num_tokens, hidden, generator=random).to(dtype))
    weight = guarded(torch.randn(hidden, generator=random).to(dtype))
    normed_expected, total_expected = add_rms_norm_reference(x, residual, weight, 1e-6)
    into = {"out": x, "residual_out": residual} if in_place else {}
    normed, total = add_rms_norm(x, residual, weight, 1e-6, **into)
    assert not in_place or (normed is x and total is residual)
    assert_close(total, total_expected)
    assert_close(normed, normed_expected)


def test_rms_norm_matches_its_formula():
    """[3, 4] has mean square 12.5: each over sqrt(12.5), times its weight."""
    normed = rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 10.0]), 0.0)
    assert normed[0].tolist() == pytest.approx([3 / 12.5**0.5, 40 / 12.5**0.5])


def test_rms_norm_keeps_a_zero_row_zero_and_reads_rows_apart(guarded):
    x = guarded(torch.tensor([[0.0, 0.0, torch.nan], [1.0, 1.0, torch.nan]]))[:, :2]
    assert rms_norm(x, torch.ones(2), 1e-6).tolist() == [[0.0, 0.0], pytest.approx([1.0, 1.0])]


@settings(max_examples=15)
@given(
    num_tokens=st.integers(1, 3),
    groups=st.sampled_from([1, 3, 7]),
    k_heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 48, 64, 80, 128]),
    dtype=DTYPES,
    seed=st.integers(0, 99),
)
def test_qk_norm_matches_reference_inside_a_merged_projection(
    num_tokens, groups, k_heads, head_dim, dtype, seed, generator, guarded, assert_close
):
    random = generator(seed)
    q_heads = groups * k_heads
    merged = torch.randn(num_tokens, q_heads + 2 * k_heads, head_dim, generator=random).to(dtype)
    weights = [guarded(torch.randn(head_dim, generator=random).to(dtype)) for _ in range(2)]
    ours, expected = guarded(merged), merged.clone()
    parts = [q_heads, k_heads, k_heads]
    qk_norm(*ours.split(parts, dim=1)[:2], *weights, 1e-6)
    qk_norm_reference(*expected.split(parts, dim=1)[:2], *weights, 1e-6)
    assert_close(ours, expected)
    assert torch.equal(ours[:, q_heads + k_heads :], merged[:, q_heads + k_heads :])


def test_no_tokens_are_fine():
    assert rms_norm(torch.empty(0, 8), torch.ones(8), 1e-6).shape == (0, 8)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: rms_norm(torch.ones(2, 4, dtype=torch.float64), torch.ones(4), 1e-6), "fp32, fp16 or bf16"),
        (lambda: rms_norm(torch.ones(2, 40000), torch.ones(40000), 1e-6), "1 to 32768"),
        (lambda: rms_norm(torch.ones(2, 4), torch.ones(5), 1e-6), r"contiguous \[4\]"),
        (lambda: rms_norm(torch.ones(4, 2).t(), torch.ones(4), 1e-6), "contiguous rows"),
        (
            lambda: add_rms_norm(torch.ones(2, 4), torch.ones(3, 4), torch.ones(4), 1e-6),
            "must have the same dtype",
        ),
        (
            lambda: qk_norm(torch.ones(1, 2, 4), torch.ones(2, 2, 4), torch.ones(4), torch.ones(4), 1e-6),
            "of the same dtype",
        ),
        (lambda: qk_norm(*[torch.ones(1, 2, 600)] * 2, *[torch.ones(600)] * 2, 1e-6), "1 to 512"),
    ],
)
def test_norms_reject(call, said):
    with pytest.raises(ValueError, match=said):
        call()
