"""Paged MLA decode against its reference and plain softmax, and arguments that its launcher refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention import Contexts
from kernels.mla_decode import mla_decode, mla_decode_reference
from tests.examples import examples
from tests.kernels.paged_kv import paged, plain


@examples(8, 60, derandomize=True)
@given(
    lens=st.lists(st.sampled_from([1, 15, 16, 17, 33, 70]), min_size=1, max_size=2),
    num_heads=st.sampled_from([1, 5, 16, 20]),
    dims=st.sampled_from([(64, 16), (128, 64), (512, 64)]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    num_ranges=st.sampled_from([1, 2, 3, 7]),
)
def test_equals_plain_softmax(lens, num_heads, dims, dtype, num_ranges, guarded, generator, assert_close):
    gen = generator(sum(lens))
    latent_dim, rope_dim = dims
    kv, contexts, dense = paged(lens, 16, 1, sum(dims), dtype, guarded, gen)
    cache = guarded(kv.keys[:, :, 0])
    q = guarded(torch.randn(len(lens), num_heads, sum(dims), generator=gen).to(dtype))
    options = {"scale": (latent_dim + rope_dim) ** -0.5, "latent_dim": latent_dim}
    expected = torch.stack(
        [plain(q[i], rows, rows[..., :latent_dim], options["scale"]) for i, (rows, _) in enumerate(dense)]
    ).to(dtype)
    assert_close(mla_decode_reference(q, cache, contexts, **options), expected, terms=4)
    assert_close(mla_decode(q, cache, contexts, num_ranges=num_ranges, **options), expected, terms=4)


def test_equals_attention_with_the_latents_expanded(generator, assert_close):
    """Absorbing is exact: keys and values made out of the latents, head by head, give the same."""
    gen = generator(0)
    num_heads, latent_dim, rope_dim, nope_dim, length = 3, 64, 16, 24, 21
    cache = torch.randn(3, 16, latent_dim + rope_dim, generator=gen)
    tables, lens = torch.tensor([[2, 1]], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    up_keys = torch.randn(num_heads, nope_dim, latent_dim, generator=gen) / 8
    up_values = torch.randn(num_heads, 20, latent_dim, generator=gen) / 8
    q = torch.randn(num_heads, nope_dim + rope_dim, generator=gen)
    absorbed = torch.cat([torch.einsum("hn,hnc->hc", q[:, :nope_dim], up_keys), q[:, nope_dim:]], 1)
    scale = (nope_dim + rope_dim) ** -0.5
    contexts = Contexts(tables, lens, length)
    latent = mla_decode(absorbed[None], cache, contexts, scale=scale, latent_dim=latent_dim)
    rows = cache[[2, 1]].flatten(0, 1)[:length]
    keys = torch.einsum("lc,hnc->lhn", rows[:, :latent_dim], up_keys)
    rope = rows[:, None, latent_dim:].expand(-1, num_heads, -1)
    values = torch.einsum("lc,hvc->lhv", rows[:, :latent_dim], up_values)
    expected = plain(q, torch.cat([keys, rope], 2), values, scale).float()
    assert_close(torch.einsum("hc,hvc->hv", latent[0], up_values), expected, terms=64)


def test_empty_context_gives_zeros():
    q, cache = torch.randn(2, 4, 80), torch.full((2, 16, 80), torch.nan)
    cache[1] = 1.0
    tables = torch.tensor([[0], [1]], dtype=torch.int32)
    lens = torch.tensor([0, 16], dtype=torch.int32)
    for num_ranges in (1, 2):
        contexts = Contexts(tables, lens, 16)
        out = mla_decode(q, cache, contexts, scale=0.1, latent_dim=64, num_ranges=num_ranges)
        assert not out[0].any()
        torch.testing.assert_close(out[1], torch.ones(4, 64))


def test_refusals_say_what_is_supported():
    q, cache = torch.zeros(1, 4, 80), torch.zeros(2, 16, 80)
    tables, lens = torch.ones(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)

    def call(q=q, cache=cache, tables=tables, latent_dim=64, **options):
        contexts = Contexts(tables, lens, 1)
        return mla_decode(q, cache, contexts, scale=1.0, latent_dim=latent_dim, **options)

    for match, wrong in (
        ("latent_dim 48 with rope_dim 32: must be one of", {"latent_dim": 48}),
        ("float64", {"q": q.double()}),
        ("latent cache of torch.float16", {"cache": cache.half()}),
        ("latent cache of torch.float32", {"cache": cache[..., :64]}),
        ("one block table", {"tables": tables.repeat(2, 1)}),
        ("int32", {"tables": tables.long()}),
        ("num_ranges of 0", {"num_ranges": 0}),
    ):
        with pytest.raises(ValueError, match=match):
            call(**wrong)
