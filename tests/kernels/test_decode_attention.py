"""Paged decode attention against its reference and plain softmax, and arguments that its launcher refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import AttentionOptions, Contexts
from kernels.decode_attention import decode_attention, decode_attention_reference
from kernels.paged_kv import PagedKv
from tests.kernels.paged_kv import paged, plain


@settings(max_examples=20, derandomize=True)
@given(data=st.data())
def test_equals_plain_softmax(data, guarded, generator, assert_close):
    block_size = data.draw(st.sampled_from([8, 16, 24]))
    edges = [1, block_size - 1, block_size, block_size + 1, 33, 70]
    lens = data.draw(st.lists(st.sampled_from(edges), min_size=1, max_size=2))
    num_kv_heads = data.draw(st.sampled_from([1, 2]))
    group = data.draw(st.sampled_from([1, 3, 4, 7]))
    head_dim = data.draw(st.sampled_from([16, 64, 96]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    window = data.draw(st.sampled_from([None, 1, 5, 40]))
    softcap = data.draw(st.sampled_from([None, 2.0]))
    num_ranges = data.draw(st.sampled_from([None, 1, 2, 3, 7]))
    gen = generator(data.draw(st.integers(0, 99)))
    kv, contexts, dense = paged(lens, block_size, num_kv_heads, head_dim, dtype, guarded, gen)
    num_heads = num_kv_heads * group
    q = guarded(torch.randn(len(lens), num_heads, head_dim, generator=gen).to(dtype))
    sinks = torch.randn(num_heads, generator=gen) if data.draw(st.booleans()) else None
    slopes = torch.rand(num_heads, generator=gen) if data.draw(st.booleans()) else None
    options = AttentionOptions(window=window, softcap=softcap, sinks_H=sinks, alibi_slopes_H=slopes)
    expected = torch.stack(
        [
            plain(
                q[i],
                k,
                v,
                head_dim**-0.5,
                window=window,
                softcap=softcap,
                sinks=sinks,
                slopes=slopes,
            )
            for i, (k, v) in enumerate(dense)
        ]
    ).to(dtype)
    assert_close(decode_attention_reference(q, kv, contexts, options), expected, terms=4)
    assert_close(decode_attention(q, kv, contexts, options, num_ranges=num_ranges), expected, terms=4)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("num_ranges", [1, 2])
def test_quantised_kv(kv_dtype, num_ranges, guarded, generator, assert_close):
    gen = generator(1)
    lens = [17, 40]
    (keys, values, *_), contexts, _ = paged(lens, 16, 2, 32, torch.float32, guarded, gen)
    key_scales, value_scales = (torch.rand(keys.shape[:3], generator=gen) / 50 + 0.01 for _ in range(2))
    key_scales[0] = value_scales[0] = torch.nan  # the null block's
    stored_keys, stored_values = (
        (cache.nan_to_num(0.0) / scales.nan_to_num(1.0)[..., None]).clamp(-127, 127).round().to(kv_dtype)
        for cache, scales in ((keys, key_scales), (values, value_scales))
    )
    q = torch.randn(2, 6, 32, generator=gen)
    kv = PagedKv(*map(guarded, (stored_keys, stored_values, key_scales, value_scales)))
    got = decode_attention(q, kv, contexts, num_ranges=num_ranges)
    for i, n in enumerate(lens):
        at = torch.arange(n)
        where = contexts.block_tables_BM[i].long()[at // 16], at % 16
        k, v = (
            stored[where].float() * scales[where][..., None]
            for stored, scales in ((stored_keys, key_scales), (stored_values, value_scales))
        )
        assert_close(got[i], plain(q[i], k, v, 32**-0.5).float(), terms=16)
    assert_close(got, decode_attention_reference(q, kv, contexts), terms=16)


def test_empty_context_and_strided_views(guarded, generator, assert_close):
    """A padded row of a captured batch gives zeros; q is part of a projection, the caches of one pool."""
    gen = generator(2)
    kv, contexts, _ = paged([20, 20], 16, 2, 64, torch.float32, guarded, gen)
    pool = torch.stack([kv.keys, kv.values], 1)
    contexts = contexts._replace(lens_B=torch.tensor([0, 20], dtype=torch.int32))
    packed = torch.randn(2, 8, 64, generator=gen)
    q = packed[:, 1:5]
    for num_ranges in (1, 2):
        out = torch.full((2, 4, 64), torch.nan)
        apart = PagedKv(pool[:, 0], pool[:, 1])
        assert decode_attention(q, apart, contexts, num_ranges=num_ranges, out_BHD=out) is out
        assert_close(out, decode_attention_reference(q, kv, contexts), terms=4)
        assert not out[0].any()


def test_refusals_say_what_is_supported():
    q = torch.zeros(1, 4, 64)
    cache = torch.zeros(2, 16, 2, 64)
    tables, lens = torch.ones(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    plain_kv = PagedKv(cache, cache)

    def call(q=q, kv=plain_kv, tables=tables, num_ranges=None, **options):
        contexts = Contexts(tables, lens, 1)
        return decode_attention(q, kv, contexts, AttentionOptions(**options), num_ranges=num_ranges)

    scales = torch.ones(2, 16, 2)
    for match, wrong in (
        ("float64: must be one of torch.float32", {"q": q.double()}),
        ("head_dim 24: must be a multiple of 16", {"q": torch.zeros(1, 4, 24)}),
        ("head_dim 512: must be", {"q": torch.zeros(1, 4, 512)}),
        ("3 heads", {"q": torch.zeros(1, 3, 64)}),
        ("both must be torch.float32 like the queries", {"kv": PagedKv(cache.half(), cache.half())}),
        ("num_blocks, block_size", {"kv": PagedKv(cache[:1], cache)}),
        ("key and value scales are needed", {"kv": PagedKv(cache.char(), cache.char())}),
        ("key and value scales must be None", {"kv": PagedKv(cache, cache, scales, scales)}),
        ("int32", {"tables": tables.long()}),
        ("1 queries, 2 block tables", {"tables": tables.repeat(2, 1)}),
        ("window of 0", {"window": 0}),
        ("softcap of 0", {"softcap": 0.0}),
        ("sinks: must be contiguous float32", {"sinks_H": torch.zeros(3)}),
        ("num_ranges of 0: must be 1 to 2048", {"num_ranges": 0}),
    ):
        with pytest.raises(ValueError, match=match):
            call(**wrong)
