"""KV in 4 bits: codes and scales, the write after RoPE, and attention, against references and float KV."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention import AttentionOptions, Contexts
from kernels.decode_attention import decode_attention, decode_attention_reference
from kernels.int4_kv import dequantise_int4_heads, quantise_int4_heads
from kernels.paged_kv import INT4, PagedKv, vector_bytes
from kernels.prefill_attention import (
    Chunks,
    DraftTree,
    prefill_attention,
    prefill_attention_reference,
)
from kernels.prefill_hopper import prefill_hopper
from kernels.rope import Rotation, rope_and_write_kv, rope_and_write_kv_reference
from kernels.rope_angles import cos_sin_table
from tests.examples import examples
from tests.kernels.paged_kv import paged


def packed(kv, guarded):
    """Returns a float cache in 4 bits, its unused slots poisoned, and what that cache stands for."""
    codes, scales, wide = [], [], []
    for cache in (kv.keys, kv.values):
        unused = cache.isnan().all(-1, keepdim=True)
        code, scale = quantise_int4_heads(cache.nan_to_num())
        wide.append(torch.where(unused, torch.nan, dequantise_int4_heads(code, scale)).to(cache.dtype))
        codes.append(guarded(torch.where(unused, 0xFF, code)))
        scales.append(guarded(torch.where(unused, torch.nan, scale)))
    return PagedKv(*codes, *scales), PagedKv(*wide)


def test_codes_are_within_half_a_step_of_what_they_stand_for(generator):
    x = torch.randn(7, 3, 64, generator=generator(0)) + 3.0
    codes, scales = quantise_int4_heads(x)
    assert (codes.shape, scales.shape) == ((7, 3, 32), (7, 3, 2))
    assert codes.numel() + 2 * scales.numel() == 21 * vector_bytes(64, INT4) == 21 * 36
    off = (dequantise_int4_heads(codes, scales) - x).abs().amax(-1)
    # fp16 rounds scale and least value to 11 bits, which may clip the largest number by a little
    step = (x.amax(-1) - x.amin(-1)) / 15
    assert bool((off <= 0.5 * step * 1.001 + x.abs().amax(-1) * 2.0**-10).all())


@pytest.mark.parametrize("number", [0.0, -2.5, 7e4, 1e-9])
def test_heads_of_equal_numbers_are_finite_and_near(number):
    codes, scales = quantise_int4_heads(torch.full((1, 16), number))
    back = dequantise_int4_heads(codes, scales)
    assert bool(scales.isfinite().all())
    assert bool(((back - min(number, 32752.0)).abs() <= 2.0**-14).all())


def test_two_codes_of_a_byte_are_neighbours():
    codes, scales = quantise_int4_heads(torch.tensor([[0.0, 15.0, 2.0, 9.0]]))
    assert codes.tolist() == [[0xF0, 0x92]]
    assert scales.tolist() == [[1.0, 0.0]]


@examples(8, 25)
@given(
    num_tokens=st.integers(1, 4),
    heads=st.sampled_from([(1, 1), (6, 2), (9, 3)]),
    dims=st.sampled_from([(64, 64), (80, 32), (80, 80), (128, 128), (16, 4)]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    interleaved=st.booleans(),
    seed=st.integers(0, 99),
)
def test_write_matches_reference_to_one_code(
    num_tokens, heads, dims, dtype, interleaved, seed, generator, guarded, assert_close
):
    random = generator(seed)
    (q_heads, kv_heads), (head_dim, rotary) = heads, dims
    merged = torch.randn(num_tokens, q_heads + 2 * kv_heads, head_dim, generator=random)
    merged = (merged + 2.0 * torch.randn(merged.shape[1:], generator=random)).to(dtype)
    slots = torch.randperm(12, generator=random)[:num_tokens] + 4
    slots = torch.where(torch.rand(num_tokens, generator=random) < 0.2, -1, slots)
    positions = torch.randint(0, 50, (num_tokens,), generator=random)
    table = guarded(cos_sin_table(rotary, 50))
    found = []
    for function in (rope_and_write_kv, rope_and_write_kv_reference):
        kv = PagedKv.zeros((4, 4, kv_heads, head_dim), INT4, torch.device("cpu"))
        kv = PagedKv(*map(guarded, kv))
        q, k, v = guarded(merged).split([q_heads, kv_heads, kv_heads], dim=1)
        before = k.clone(), v.clone()
        function(q, k, v, Rotation(positions, table, interleaved), kv, slots)
        assert torch.equal(k, before[0])
        assert torch.equal(v, before[1])
        found.append((q.clone(), kv))
    (ours_q, ours), (expected_q, expected) = found
    assert_close(ours_q, expected_q, terms=2)
    for name in ("key", "value"):
        codes, scales = getattr(ours, f"{name}s"), getattr(ours, f"{name}_scales")
        wanted, wanted_scales = getattr(expected, f"{name}s"), getattr(expected, f"{name}_scales")
        torch.testing.assert_close(scales, wanted_scales, rtol=2e-3, atol=1e-3)
        off = sum(
            ((codes >> shift & 15).int() - (wanted >> shift & 15).int()).abs() for shift in (0, 4)
        )  # of both codes of a byte
        assert bool((off <= 2).all())
        assert off.count_nonzero() <= max(2, 0.1 * off.numel())  # rounding at a tie, no more


@pytest.mark.parametrize("head_dim", [32, 48, 96])
@pytest.mark.parametrize(("window", "num_ranges"), [(None, 1), (None, 2), (9, None)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_attention(head_dim, window, num_ranges, dtype, guarded, generator, assert_close):
    kv, contexts, _ = paged([17, 40], 16, 2, head_dim, dtype, guarded, generator(1))
    kv, wide = packed(kv, guarded)
    q = torch.randn(2, 6, head_dim, generator=generator(2)).to(dtype)
    options = AttentionOptions(window=window)
    expected = decode_attention_reference(q, wide, contexts, options)
    assert_close(decode_attention_reference(q, kv, contexts, options), expected, terms=4)
    assert_close(decode_attention(q, kv, contexts, options, num_ranges=num_ranges), expected, terms=4)


@pytest.mark.parametrize("head_dim", [32, 80])
@pytest.mark.parametrize("window", [None, 9])
def test_prefill_attention(head_dim, window, guarded, generator, assert_close):
    kv, contexts, _ = paged([41, 15, 97], 16, 2, head_dim, torch.float32, guarded, generator(4))
    kv, wide = packed(kv, guarded)
    q = torch.randn(35, 6, head_dim, generator=generator(5))
    chunks = Chunks(torch.tensor([0, 9, 24, 35], dtype=torch.int32), 15)
    args = contexts, chunks, AttentionOptions(window=window)
    expected = prefill_attention_reference(q, wide, *args)
    assert_close(prefill_attention_reference(q, kv, *args), expected, terms=4)
    for num_ranges in (None, 3):
        assert_close(prefill_attention(q, kv, *args, num_ranges=num_ranges), expected, terms=4)


def test_hopper_copies_keys_and_values_out_of_the_cache(guarded, generator, assert_close):
    kv, contexts, _ = paged([70], 16, 2, 64, torch.float32, guarded, generator(6))
    kv, wide = packed(kv, guarded)
    q = torch.randn(40, 4, 64, generator=generator(7))
    chunks = Chunks(torch.tensor([0, 40], dtype=torch.int32), 40)
    expected = prefill_attention_reference(q, wide, contexts, chunks)
    assert_close(prefill_hopper(q, kv, contexts, chunks), expected, terms=4)


def test_tree_of_drafts(guarded, generator, assert_close):
    """Two branches of one root, which do not see each other."""
    kv, contexts, _ = paged([43], 16, 1, 32, torch.float32, guarded, generator(8))
    kv, wide = packed(kv, guarded)
    q = torch.randn(3, 2, 32, generator=generator(9))
    mask = torch.eye(3, dtype=torch.bool)
    mask[:, 0] = True
    tree = DraftTree(mask.flatten(), torch.zeros(1, dtype=torch.int32))
    chunks = Chunks(torch.tensor([0, 3], dtype=torch.int32), 3)
    expected = prefill_attention_reference(q, wide, contexts, chunks, tree=tree)
    assert_close(prefill_attention(q, kv, contexts, chunks, tree=tree), expected, terms=4)


def test_refusals_say_what_is_supported():
    kv = PagedKv.zeros((2, 16, 2, 64), INT4, torch.device("cpu"))
    contexts = Contexts(torch.ones(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32), 1)
    q = torch.zeros(1, 4, 64)
    for match, wrong in (
        ("2 KV heads of 64 do not fit queries of 4 heads of 32", (q[..., :32].contiguous(), kv)),
        ("key and value scales are needed", (q, PagedKv(kv.keys, kv.values))),
        (
            r"scales of torch.float32.*contiguous torch.float16 \[2, 16, 2, 2\]",
            (q, PagedKv(kv.keys, kv.values, kv.key_scales.float(), kv.value_scales.float())),
        ),
    ):
        with pytest.raises(ValueError, match=match):
            decode_attention(*wrong, contexts)
    rotation = Rotation(torch.zeros(1, dtype=torch.int32), cos_sin_table(6, 8))
    with pytest.raises(ValueError, match="6 rotary dimensions; must be a multiple of 4 with a 4-bit cache"):
        rope_and_write_kv(q, q[:, :2], q[:, :2], rotation, kv, torch.zeros(1, dtype=torch.int32))
