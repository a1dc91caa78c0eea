from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.paged_kv import PagedKv
from kernels.rope import Rotation, quantise_heads, rope_and_write_kv, rope_and_write_kv_reference
from kernels.rope_angles import cos_sin_table
from tests.examples import examples

BLOCK = 4


class Step:
    """Inputs of one step: a few tokens at shuffled slots of caches whose every number is NaN (1 in int8)."""

    def __init__(self, random, guarded, num_tokens, q_heads, kv_heads, head_dim, rotary, dtype, cache_dtype):
        merged = torch.randn(num_tokens, q_heads + 2 * kv_heads, head_dim, generator=random).to(dtype)
        self.merged = guarded(merged)
        self.qkv = self.merged.split([q_heads, kv_heads, kv_heads], dim=1)
        self.positions = torch.randint(0, 50, (num_tokens,), generator=random)
        self.table = guarded(cos_sin_table(rotary, 50))
        num_blocks = num_tokens // BLOCK + 2
        shuffled = torch.randperm((num_blocks - 1) * BLOCK, generator=random)[:num_tokens] + BLOCK
        self.slots = torch.where(torch.rand(num_tokens, generator=random) < 0.2, -1, shuffled)
        cache = torch.full(
            (num_blocks, BLOCK, kv_heads, head_dim), 1.0 if cache_dtype == torch.int8 else torch.nan
        )
        self.caches = [guarded(cache.to(cache_dtype)) for _ in range(2)]
        self.scales = [None, None]
        if cache_dtype.itemsize == 1:
            self.scales = [guarded(torch.full(cache.shape[:3], torch.nan)) for _ in range(2)]

    def run(self, function, interleaved=False):
        rotation = Rotation(self.positions, self.table, interleaved)
        return function(*self.qkv, rotation, PagedKv(*self.caches, *self.scales), self.slots)


@examples(8, 25)
@given(
    num_tokens=st.integers(1, 5),
    heads=st.sampled_from([(1, 1), (4, 1), (9, 3), (6, 2), (32, 8)]),
    dims=st.sampled_from([(2, 2), (64, 64), (80, 32), (80, 80), (96, 48), (128, 128)]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    interleaved=st.booleans(),
    seed=st.integers(0, 99),
)
def test_rope_and_write_matches_reference(
    num_tokens, heads, dims, dtype, interleaved, seed, generator, guarded, assert_close
):
    ours, expected = (
        Step(generator(seed), guarded, num_tokens, *heads, *dims, dtype, dtype) for _ in range(2)
    )
    assert ours.run(rope_and_write_kv, interleaved) is ours.qkv[0]
    expected.run(rope_and_write_kv_reference, interleaved)
    assert_close(ours.merged, expected.merged, terms=2)  # k and v among them: left as they were
    for cache, reference in zip(ours.caches, expected.caches, strict=True):
        assert torch.equal(cache.isnan(), reference.isnan())  # the same slots written, and only those
        assert_close(cache.nan_to_num(), reference.nan_to_num(), terms=2)


@examples(8, 20)
@given(
    num_tokens=st.integers(1, 4),
    heads=st.sampled_from([(2, 1), (6, 2), (9, 3)]),
    dims=st.sampled_from([(64, 64), (80, 32), (80, 80), (128, 128)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cache_dtype=st.sampled_from([torch.int8, torch.float8_e4m3fn]),
    interleaved=st.booleans(),
    seed=st.integers(0, 99),
)
def test_quantised_cache_matches_reference_to_one_code(
    num_tokens, heads, dims, dtype, cache_dtype, interleaved, seed, generator, guarded
):
    ours, expected = (
        Step(generator(seed), guarded, num_tokens, *heads, *dims, dtype, cache_dtype) for _ in range(2)
    )
    ours.run(rope_and_write_kv, interleaved)
    expected.run(rope_and_write_kv_reference, interleaved)
    for ours_scales, scales in zip(ours.scales, expected.scales, strict=True):
        torch.testing.assert_close(ours_scales, scales, rtol=1e-5, atol=0, equal_nan=True)
    for ours_cache, cache in zip(ours.caches, expected.caches, strict=True):
        found, wanted = ours_cache.float(), cache.float()
        assert torch.equal(found.isnan(), wanted.isnan())
        off = (found - wanted).nan_to_num().abs()
        one_code = 1.0 if cache_dtype == torch.int8 else (wanted.abs() / 8).nan_to_num().clamp(min=2.0**-9)
        assert bool((off <= one_code).all())
        assert off.count_nonzero() <= 0.1 * off.numel()  # rounding at a tie, no more


@pytest.mark.parametrize(("dtype", "most"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 1 / 16)])
def test_quantised_heads_are_near_what_they_stand_for(dtype, most, generator):
    x = torch.randn(7, 3, 64, generator=generator(0))
    codes, scales = quantise_heads(x, dtype)
    back = codes.to(dtype).float() * scales[..., None]
    assert bool(((back - x).abs() <= most * 1.001 * x.abs().amax(-1, keepdim=True)).all())


def test_a_zero_head_is_quantised_to_zero(guarded, generator):
    step = Step(generator(0), guarded, 1, 1, 1, 64, 64, torch.float32, torch.int8)
    step.merged.zero_()
    step.slots.fill_(BLOCK)
    step.run(rope_and_write_kv)
    assert step.caches[0][1, 0].count_nonzero() == 0
    assert bool(step.scales[0][1, 0].isfinite().all())


def test_rotation_turns_each_pair_by_position_times_frequency():
    """neox: dimensions (0, 2) turn by 1 rad a position, (1, 3) by 0.01 (base 10000, 4 dimensions)."""
    table = cos_sin_table(4, 8)
    for interleaved, pairs in ((False, ((0, 2), (1, 3))), (True, ((0, 1), (2, 3)))):
        q = torch.ones(1, 1, 4)
        cache = torch.zeros(2, 1, 1, 4)
        rotation = Rotation(torch.tensor([7]), table, interleaved)
        k, v = torch.ones(2, 1, 1, 4)
        rope_and_write_kv(q, k, v, rotation, PagedKv(cache, cache.clone()), torch.tensor([1]))
        for (first, second), frequency in zip(pairs, (1.0, 0.01), strict=True):
            angle = 7 * frequency
            turned = [math.cos(angle) - math.sin(angle), math.cos(angle) + math.sin(angle)]
            assert q[0, 0, [first, second]].tolist() == pytest.approx(turned, rel=1e-5)
        assert torch.equal(cache[1, 0], q[0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: setattr(s, "table", s.table.double()), "fp32"),
        (lambda s: setattr(s, "slots", s.slots[:1]), r"slots.*\[2\]"),
        (
            lambda s: setattr(s, "scales", [torch.ones(2, 4, 1), None]),
            "key_scales: must be given for an int8, fp8 or 4-bit cache",
        ),
        (
            lambda s: setattr(s, "caches", [c.double() for c in s.caches]),
            r"int8, float8_e4m3fn or uint8 \(4 bits\), the same for both",
        ),
        (lambda s: setattr(s, "caches", [c.to(torch.int8) for c in s.caches]), "key_scales: must be given"),
        (lambda s: setattr(s, "caches", [c[..., :32] for c in s.caches]), "num_blocks, block_size, 1, 64"),
        (lambda s: setattr(s, "qkv", (s.qkv[0], s.qkv[1].half(), s.qkv[2])), "k: torch.float16"),
    ],
)
def test_rope_and_write_rejects(change, said, generator, guarded):
    step = Step(generator(0), guarded, 2, 1, 1, 64, 64, torch.float32, torch.float32)
    change(step)
    with pytest.raises(ValueError, match=said):
        step.run(rope_and_write_kv)
