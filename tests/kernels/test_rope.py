from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rope import (
    cos_sin_table,
    quantise_heads,
    rope_and_write_kv,
    rope_and_write_kv_reference,
    rope_frequencies,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
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
        return function(
            *self.qkv,
            self.positions,
            self.table,
            *self.caches,
            self.slots,
            key_scales=self.scales[0],
            value_scales=self.scales[1],
            interleaved=interleaved,
        )


@settings(max_examples=25)
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


@settings(max_examples=20)
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
        rope_and_write_kv(
            q,
            torch.ones(1, 1, 4),
            torch.ones(1, 1, 4),
            torch.tensor([7]),
            table,
            cache,
            cache.clone(),
            torch.tensor([1]),
            interleaved=interleaved,
        )
        for (first, second), frequency in zip(pairs, (1.0, 0.01), strict=True):
            angle = 7 * frequency
            turned = [math.cos(angle) - math.sin(angle), math.cos(angle) + math.sin(angle)]
            assert q[0, 0, [first, second]].tolist() == pytest.approx(turned, rel=1e-5)
        assert torch.equal(cache[1, 0], q[0])


def test_llama3_scaling_matches_its_formula():
    """Written out as in the Llama 3.1 code: by wavelength, three branches."""
    frequencies, factor = rope_frequencies(128, 500000.0, LLAMA3)
    plain, _ = rope_frequencies(128, 500000.0)
    assert factor == 1.0
    for ours, frequency in zip(frequencies.tolist(), plain.tolist(), strict=True):
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            expected = frequency
        elif wavelength > 8192 / 1:
            expected = frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            expected = (1 - smooth) * frequency / 8 + smooth * frequency
        assert ours == pytest.approx(expected, rel=1e-6)
    assert frequencies[0] == 1.0
    assert frequencies[-1] == pytest.approx(plain[-1].item() / 8, rel=1e-6)


def test_yarn_scaling_matches_its_formula():
    """Pairs that turn over 32 times in the original context are kept, under once: slowed by the factor."""
    frequencies, factor = rope_frequencies(128, 1e6, YARN)
    plain, _ = rope_frequencies(128, 1e6)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    turns = 32768 * plain / (2 * math.pi)
    assert torch.equal(frequencies[turns > 33 * 1.3], plain[turns > 33 * 1.3])
    slow = turns < 0.75
    torch.testing.assert_close(frequencies[slow], plain[slow] / 4)
    share = frequencies / plain
    assert bool((share.diff() <= 1e-12).all())  # a ramp between
    assert bool(((share > 0.26) & (share < 0.99)).any())


def test_yarn_of_deepseek_takes_the_ratio_of_its_magnitudes():
    scaling = {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.5}
    _, factor = rope_frequencies(64, 1e4, scaling)
    assert factor == pytest.approx((0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1))
    assert rope_frequencies(64, 1e4, {**scaling, "attention_factor": 1.5})[1] == 1.5
    table = cos_sin_table(64, 2, base=1e4, scaling=scaling)
    assert table[0, 0] == pytest.approx(factor)


def test_linear_scaling_divides_and_table_is_cosines_then_sines():
    plain, linear = cos_sin_table(8, 9), cos_sin_table(8, 9, scaling={"type": "linear", "factor": 2.0})
    torch.testing.assert_close(linear[8], plain[4])
    torch.testing.assert_close(plain[:, 0], torch.arange(9.0).cos())
    torch.testing.assert_close(plain[:, 4], torch.arange(9.0).sin())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: setattr(s, "table", s.table.double()), "fp32"),
        (lambda s: setattr(s, "slots", s.slots[:1]), r"slots.*\[2\]"),
        (
            lambda s: setattr(s, "scales", [torch.ones(2, 4, 1), None]),
            "key_scales: needed for an int8 or fp8",
        ),
        (
            lambda s: setattr(s, "caches", [c.double() for c in s.caches]),
            "int8 and float8_e4m3fn are supported",
        ),
        (lambda s: setattr(s, "caches", [c.to(torch.int8) for c in s.caches]), "key_scales: needed"),
        (lambda s: setattr(s, "caches", [c[..., :32] for c in s.caches]), "num_blocks, block_size, 1, 64"),
        (lambda s: setattr(s, "qkv", (s.qkv[0], s.qkv[1].half(), s.qkv[2])), "k: torch.float16"),
    ],
)
def test_rope_and_write_rejects(change, said, generator, guarded):
    step = Step(generator(0), guarded, 2, 1, 1, 64, 64, torch.float32, torch.float32)
    change(step)
    with pytest.raises(ValueError, match=said):
        step.run(rope_and_write_kv)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [({"rope_type": "dynamic"}, "llama3 and yarn are supported"), ({"rope_type": "llama3"}, "lacks")],
)
def test_scaling_rejects(scaling, said):
    with pytest.raises(ValueError, match=said):
        cos_sin_table(64, 4, scaling=scaling)
