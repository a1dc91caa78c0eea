"""Prefill attention for Hopper against plain softmax and the portable kernel; order of tiles; refusals."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention import AttentionOptions, Contexts
from kernels.case import Case
from kernels.paged_kv import PagedKv
from kernels.prefill_attention import Chunks, DraftTree, prefill_attention
from kernels.prefill_hopper import (
    INTERPRETED,
    MIN_QUERIES,
    cases,
    prefill_hopper,
    schedule_of,
    unsupported,
)
from realengine.attention.choice import with_attention
from realengine.model.backend import TRITON
from tests.examples import examples
from tests.kernels.conftest import DEVICE
from tests.kernels.paged_kv import paged, plain

# Specialised warps have never run on a GPU: they must not hang a run of all tests.
pytestmark = pytest.mark.skipif(
    DEVICE != "cpu" and ("KERNELS_HOPPER" not in os.environ or torch.cuda.get_device_capability() != (9, 0)),
    reason="on a GPU only with KERNELS_HOPPER=1, on Hopper",
)
# A compiled kernel has the head sizes, types and chunks of real models.
ON_GPU = DEVICE != "cpu"
HEAD_DIMS = (64, 128) if ON_GPU else (16, 64)
DTYPES = (torch.float16, torch.bfloat16) if ON_GPU else (torch.float32, torch.float16, torch.bfloat16)


def chunks_of(query_lens):
    return Chunks(torch.tensor([0, *query_lens]).cumsum(0).int(), max([*query_lens, MIN_QUERIES]))


def softmax_of_all(q, dense, query_lens, lens, options):
    """Returns the attention of each query, one at a time in float64."""
    expected, token = torch.zeros_like(q), 0
    for (k, v), num_queries, n in zip(dense, query_lens, lens, strict=True):
        for i in range(n - num_queries, n):
            expected[token] = plain(
                q[token],
                k[: i + 1],
                v[: i + 1],
                q.shape[-1] ** -0.5,
                window=options.window,
                softcap=options.softcap,
                sinks=options.sinks_H,
            ).to(q.dtype)
            token += 1
    return expected


@pytest.mark.slow
@examples(10, 80, derandomize=True)
@given(data=st.data())
def test_equals_plain_softmax(data, guarded, generator, assert_close):
    """Chunks on prefixes, whole prompts and empty chunks, mixed; unused slots and skipped blocks are NaN."""
    query_lens, lens = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        query_lens.append(data.draw(st.sampled_from([0, 1, 19, 32, 70])))
        lens.append(query_lens[-1] + data.draw(st.sampled_from([0, 1, 15, 16, 45])))
    lens[0], query_lens[0] = max(1, lens[0]), max(1, query_lens[0])
    num_kv_heads, group = data.draw(st.sampled_from([1, 2])), data.draw(st.sampled_from([1, 3]))
    head_dim, dtype = data.draw(st.sampled_from(HEAD_DIMS)), data.draw(st.sampled_from(DTYPES))
    gen = generator(data.draw(st.integers(0, 99)))
    kv, contexts, dense = paged(lens, 8, num_kv_heads, head_dim, dtype, guarded, gen)
    num_heads = num_kv_heads * group
    sinks = torch.randn(num_heads, generator=gen) if data.draw(st.booleans()) else None
    options = AttentionOptions(
        window=data.draw(st.sampled_from([None, 1, 6, 40])),
        softcap=data.draw(st.sampled_from([None, 2.0])),
        sinks_H=sinks,
    )
    q = guarded(torch.randn(sum(query_lens), num_heads, head_dim, generator=gen).to(dtype))
    args = (q, kv, contexts, chunks_of(query_lens), options)
    got = prefill_hopper(*args, specialised=data.draw(st.booleans()))
    assert_close(got, softmax_of_all(q, dense, query_lens, lens, options), terms=4)
    assert_close(got, prefill_attention(*args), terms=4)


@pytest.mark.parametrize("block_size", [64, 128] if ON_GPU else [32, 64])
def test_tiles_are_read_from_blocks(block_size, guarded, generator, assert_close):
    """Blocks that hold whole tiles are not copied first; the rest of the last block is finite."""
    query_lens, lens = [70, 33], [70, 90]
    kv, contexts, dense = paged(lens, block_size, 2, HEAD_DIMS[1], torch.float16, guarded, generator(1))
    kv = PagedKv(*(guarded(cache.nan_to_num(7.0)) for cache in kv[:2]))
    q = torch.randn(103, 4, HEAD_DIMS[1], generator=generator(2)).half()
    options = AttentionOptions()
    got = prefill_hopper(q, kv, contexts, chunks_of(query_lens), options)
    assert_close(got, softmax_of_all(q, dense, query_lens, lens, options), terms=4)


def test_quantised_caches_are_widened_once(guarded, generator, assert_close):
    lens, gen = [50, 40], generator(3)
    kv, contexts, _ = paged(lens, 16, 2, HEAD_DIMS[1], torch.float16, guarded, gen)
    codes = [torch.randint(-100, 100, cache.shape, generator=gen).to(torch.int8) for cache in kv[:2]]
    scales = [torch.rand(cache.shape[:3], generator=gen) * 0.02 for cache in kv[:2]]
    wide = PagedKv(*((c * s[..., None]).half() for c, s in zip(codes, scales, strict=True)))
    q = torch.randn(60, 4, HEAD_DIMS[1], generator=gen).half()
    step = (contexts, chunks_of([35, 25]))
    got = prefill_hopper(q, PagedKv(*codes, *scales), *step)
    assert_close(got, prefill_attention(q, wide, *step), terms=16)


def test_a_view_of_packed_queries_and_an_output_of_its_own(guarded, generator, assert_close):
    """Queries are a part of a row of queries, keys and values; rows of no sequence are not written."""
    lens, dim = [40, 33], HEAD_DIMS[1]
    kv, contexts, dense = paged(lens, 8, 2, dim, torch.float16, guarded, generator(4))
    q = torch.randn(80, 8, dim, generator=generator(5)).half()[:, :4]
    out = torch.full((80, 4, dim), 7.0).half()
    prefill_hopper(q, kv, contexts, chunks_of([40, 33]), out_THD=out)
    assert_close(out[:73], softmax_of_all(q[:73], dense, lens, lens, AttentionOptions()), terms=4)
    assert (out[73:] == 7).all()


@given(
    chunks=st.lists(st.tuples(st.integers(0, 300), st.integers(0, 2000)), min_size=1, max_size=40),
    window=st.sampled_from([None, 50]),
)
@examples(20, 100, derandomize=True)
def test_each_tile_is_scheduled_once_and_those_with_most_keys_first(chunks, window):
    starts = torch.tensor([0, *(count for count, _ in chunks)]).cumsum(0).int()
    lens = torch.tensor([max(1, count + cached) for count, cached in chunks]).int()
    tile = INTERPRETED
    num_units = int(starts[-1]) // tile.block_m + len(chunks)
    contexts = Contexts(torch.zeros(len(chunks), 1, dtype=torch.int32), lens, int(lens.max()), {})
    options = AttentionOptions(window=window)
    schedule = schedule_of(contexts, Chunks(starts, MIN_QUERIES), options, tile, num_units)
    assert schedule is schedule_of(contexts, Chunks(starts, MIN_QUERIES), options, tile, num_units)
    counts = starts.diff().tolist()
    units = [tuple(row) for row in schedule.tolist()]
    assert len(set(units)) == num_units
    filled = [(seq, first) for seq, first in units if first < counts[seq]]
    assert set(filled) == {(s, i) for s, count in enumerate(counts) for i in range(0, count, tile.block_m)}

    def num_tiles(seq, first):
        prefix, last = int(lens[seq]) - counts[seq], min(first + tile.block_m, counts[seq])
        lowest = 0 if window is None else max(0, prefix + first - window + 1) // tile.block_n
        return -(-(prefix + last) // tile.block_n) - lowest

    lengths = [num_tiles(*unit) for unit in filled]
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"slopes": True}, "ALiBi"),
        ({"strided": True}, "strided queries"),
        ({"max_len": 1 << 26}, "contexts of more than 512 MiB"),
    ],
)
def test_refuses_with_the_reason(change, reason, guarded, generator):
    kv, contexts, _ = paged([40], 8, 2, 64, torch.float16, guarded, generator(6))
    q = torch.zeros(40, 2, 64, dtype=torch.float16)
    if "strided" in change:
        q = torch.zeros(2, 40, 64, dtype=torch.float16).transpose(0, 1)
    contexts = contexts._replace(max_len=change.get("max_len", 40))
    options = AttentionOptions(alibi_slopes_H=torch.ones(2) if "slopes" in change else None)
    assert unsupported(q, kv, contexts, chunks_of([40]), options) == reason
    with pytest.raises(ValueError, match=f"{reason}: not supported by prefill_hopper"):
        prefill_hopper(q, kv, contexts, chunks_of([40]), options)


def test_the_engine_computes_long_chunks_with_it_and_trees_without(guarded, generator, assert_close):
    """In the interpreter its chunks may be short; real sizes are those of the launch table."""
    attention = with_attention(TRITON, "triton_hopper", torch.device(DEVICE)).prefill_attention
    kv, contexts, _ = paged([50], 8, 2, 64, torch.float16, guarded, generator(8))
    q = torch.randn(40, 4, 64, generator=generator(9)).half()
    chunks = chunks_of([40])
    out = torch.empty_like(q)
    assert attention(q, kv, contexts, chunks, out_THD=out) is out
    assert_close(out, prefill_attention(q, kv, contexts, chunks), terms=4)
    tree = DraftTree(torch.ones(40, 40).tril().bool(), torch.zeros(1, dtype=torch.int32))
    assert_close(attention(q, kv, contexts, chunks, tree=tree), out, terms=4)
    assert attention.counts == {"triton_hopper": 1, "a token tree": 1}


def test_cases_have_both_kinds_of_programs():
    names = [case.name for case in cases()]
    assert len(set(names)) == len(names)
    assert any(name.endswith("-plain") for name in names)
    assert all(isinstance(case, Case) for case in cases())
