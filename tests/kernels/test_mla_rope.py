"""Rotation of latent attention's queries and the write of its rows, against the reference and plain parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.mla_rope import mla_rope_and_write, mla_rope_and_write_reference
from kernels.norm import rms_norm_reference
from kernels.rope import Rotation, rotated
from kernels.rope_angles import cos_sin_table


@settings(max_examples=20, derandomize=True)
@given(
    num_tokens=st.sampled_from([1, 5]),
    num_heads=st.sampled_from([1, 5, 16, 20]),
    dims=st.sampled_from([(64, 16), (128, 64), (512, 64)]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    interleaved=st.booleans(),
)
def test_equals_norm_and_rotation(
    num_tokens, num_heads, dims, dtype, interleaved, guarded, generator, assert_close
):
    gen = generator(num_heads)
    latent_dim, rope_dim = dims
    wide = torch.randn(num_tokens, num_heads, 24 + rope_dim, generator=gen).to(dtype)
    q = guarded(wide)[:, :, 24:]
    rows = guarded(torch.randn(num_tokens, sum(dims) + 8, generator=gen).to(dtype))[:, : sum(dims)]
    weight = torch.randn(latent_dim, generator=gen).to(dtype)
    slots = (torch.randperm(31, generator=gen) + 1)[:num_tokens]
    slots[0] = -1 if num_tokens > 1 else slots[0]
    positions = torch.randint(0, 90, (num_tokens,), generator=gen)
    rotation = Rotation(positions, cos_sin_table(rope_dim, 100), interleaved)
    at = rotation.cos_sin_PR[positions]
    turned = rotated(q, at, interleaved).to(dtype)
    key = rotated(rows[:, None, latent_dim:], at, interleaved)[:, 0].to(dtype)
    latent = rms_norm_reference(rows[:, :latent_dim], weight, 1e-6)
    for function in (mla_rope_and_write, mla_rope_and_write_reference):
        cache = guarded(torch.full((2, 16, sum(dims)), 7.0, dtype=dtype))
        out = guarded(torch.zeros(num_tokens, num_heads, sum(dims), dtype=dtype))
        found = function(q, rows, weight, 1e-6, rotation, cache, slots, out[:, :, latent_dim:])
        assert_close(found, turned, terms=2)
        assert not out[:, :, :latent_dim].any()
        for token, slot in enumerate(slots.tolist()):
            if slot >= 0:
                stored = cache.flatten(0, 1)[slot]
                assert_close(stored[:latent_dim], latent[token], terms=4)
                assert_close(stored[latent_dim:], key[token], terms=2)
        untouched = torch.ones(32, dtype=torch.bool)
        untouched[slots[slots >= 0]] = False
        assert (cache.flatten(0, 1)[untouched] == 7).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": torch.zeros(48)}, "latent_dim 48 with rope_dim 16: must be one of"),
        ({"rows": torch.zeros(2, 96)}, r"rows \[2, 96\].*must be \[2, 80\]"),
        ({"cache": torch.zeros(2, 16, 80).half()}, "must be torch.float32 as q"),
        ({"slots": torch.zeros(3, dtype=torch.int64)}, r"slots: .*must be contiguous integers \[2\]"),
        ({"out": torch.zeros(2, 3, 16)}, "of one shape"),
    ],
)
def test_refuses_what_it_does_not_support(change, message):
    given = {
        "q": torch.zeros(2, 4, 16),
        "rows": torch.zeros(2, 80),
        "weight": torch.zeros(64),
        "cache": torch.zeros(2, 16, 80),
        "slots": torch.zeros(2, dtype=torch.int64),
        "out": torch.zeros(2, 4, 16),
    } | change
    rotation = Rotation(torch.zeros(2, dtype=torch.int64), cos_sin_table(16, 4))
    q, rows, weight, cache, slots, out = given.values()
    with pytest.raises(ValueError, match=message):
        mla_rope_and_write(q, rows, weight, 1e-6, rotation, cache, slots, out)
