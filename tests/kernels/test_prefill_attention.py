"""Paged prefill attention against its reference and plain softmax; trees, and refused arguments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.attention import AttentionOptions, Contexts
from kernels.decode_attention import decode_attention
from kernels.paged_kv import PagedKv
from kernels.prefill_attention import (
    Chunks,
    DraftTree,
    prefill_attention,
    prefill_attention_reference,
)
from tests.examples import examples
from tests.kernels.paged_kv import paged, plain


def chunks_of(query_lens):
    return Chunks(torch.tensor([0, *query_lens]).cumsum(0).int(), max(query_lens))


@examples(8, 60, derandomize=True)
@given(data=st.data())
def test_equals_plain_softmax(data, guarded, generator, assert_close):
    """Chunks on prefixes, whole prompts, decode rows and a padded sequence of a captured batch, mixed."""
    block_size = data.draw(st.sampled_from([8, 16]))
    query_lens, lens = [], []
    for _ in range(data.draw(st.integers(1, 3))):
        query_lens.append(data.draw(st.sampled_from([0, 1, 3, 11, 19])))
        prefix = data.draw(st.sampled_from([0, 1, block_size - 1, block_size, block_size + 1, 45]))
        lens.append(query_lens[-1] + prefix)
    lens[0], query_lens[0] = max(1, lens[0]), max(1, query_lens[0])
    num_kv_heads = data.draw(st.sampled_from([1, 2]))
    group = data.draw(st.sampled_from([1, 3, 4]))
    head_dim = data.draw(st.sampled_from([16, 64, 80]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    window = data.draw(st.sampled_from([None, 1, 6, 40]))
    softcap = data.draw(st.sampled_from([None, 2.0]))
    num_ranges = data.draw(st.sampled_from([None, 1, 2, 5]))
    gen = generator(data.draw(st.integers(0, 99)))
    kv, contexts, dense = paged(lens, block_size, num_kv_heads, head_dim, dtype, guarded, gen)
    num_heads = num_kv_heads * group
    sinks = torch.randn(num_heads, generator=gen) if data.draw(st.booleans()) else None
    slopes = torch.rand(num_heads, generator=gen) if data.draw(st.booleans()) else None
    q = guarded(torch.randn(sum(query_lens), num_heads, head_dim, generator=gen).to(dtype))
    options = AttentionOptions(window=window, softcap=softcap, sinks_H=sinks, alibi_slopes_H=slopes)
    args = (q, kv, contexts, chunks_of(query_lens), options)
    expected, token = torch.zeros_like(q), 0
    for (k, v), num_queries, n in zip(dense, query_lens, lens, strict=True):
        for i in range(n - num_queries, n):
            expected[token] = plain(
                q[token],
                k[: i + 1],
                v[: i + 1],
                head_dim**-0.5,
                window=window,
                softcap=softcap,
                sinks=sinks,
                slopes=slopes,
            ).to(dtype)
            token += 1
    assert_close(prefill_attention_reference(*args), expected, terms=4)
    assert_close(prefill_attention(*args, num_ranges=num_ranges), expected, terms=4)


@pytest.mark.parametrize("window", [None, 5, 59, 60])
@pytest.mark.parametrize("num_ranges", [1, 2])
def test_tile_edges_and_freed_blocks(window, num_ranges, guarded, generator, assert_close):
    """The diagonal and the window's edge cross tiles; blocks before the window are the null block, NaN."""
    kv, contexts, dense = paged([97], 16, 1, 32, torch.float32, guarded, generator(6))
    freed = contexts.block_tables_BM.clone()
    freed[0, : 0 if window is None else (86 - window + 1) // 16] = 0
    q = torch.randn(11, 3, 32, generator=generator(7))  # tiles of ten tokens, two rows left over
    contexts = contexts._replace(block_tables_BM=freed)
    args = (q, kv, contexts, chunks_of([11]), AttentionOptions(window=window))
    ((k, v),) = dense
    expected = torch.stack(
        [plain(q[i], k[: 87 + i], v[: 87 + i], 32**-0.5, window=window) for i in range(11)]
    ).float()
    assert_close(prefill_attention_reference(*args), expected, terms=4)
    assert_close(prefill_attention(*args, num_ranges=num_ranges), expected, terms=4)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_ranges", [1, 2])
def test_tree(window, num_ranges, guarded, generator, assert_close):
    """Two trees of drafts: each node sees the prefix, its ancestors and itself, at its depth's position."""
    parents = [[-1, 0, 0, 1, 1, 2, 5], [-1, 0, 1]]
    prefixes = [60, 2]
    lens = [prefix + len(tree) for prefix, tree in zip(prefixes, parents, strict=True)]
    gen = generator(3)
    kv, contexts, dense = paged(lens, 16, 1, 32, torch.float32, guarded, gen)
    masks, positions = [], []
    for prefix, tree in zip(prefixes, parents, strict=True):
        mask = torch.eye(len(tree), dtype=torch.bool)
        for node, parent in enumerate(tree):
            if parent >= 0:
                mask[node] |= mask[parent]
        masks.append(mask)
        positions.append((prefix + mask.sum(1) - 1).int())
    slopes = None if window is None else torch.tensor([0.3, 0.1])
    q = torch.randn(10, 2, 32, generator=gen)
    args = (q, kv, contexts, chunks_of([7, 3]), AttentionOptions(window=window, alibi_slopes_H=slopes))
    bits = guarded(torch.cat([mask.flatten() for mask in masks]).view(torch.uint8)).view(torch.bool)
    starts = torch.tensor([0, 49], dtype=torch.int32)
    drafts = DraftTree(bits, starts, guarded(torch.cat(positions)))
    expected, token = torch.zeros_like(q), 0
    for (k, v), prefix, mask, at in zip(dense, prefixes, masks, positions, strict=True):
        key_at = torch.cat([torch.arange(prefix), at])
        for i in range(len(at)):
            seen = torch.cat([torch.ones(prefix, dtype=torch.bool), mask[i]])
            distance = key_at - at[i]
            expected[token] = plain(
                q[token], k, v, 32**-0.5, window=window, slopes=slopes, distance=distance, seen=seen
            ).float()
            token += 1
    assert_close(prefill_attention_reference(*args, tree=drafts), expected, terms=4)
    assert_close(prefill_attention(*args, tree=drafts, num_ranges=num_ranges), expected, terms=4)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_ranges", [1, 2])
@pytest.mark.parametrize("num_heads", [2, 3])
def test_the_last_level_of_a_tree_is_as_in_the_whole_tree(
    num_heads, window, num_ranges, guarded, generator, assert_close
):
    """The mask also covers the levels before, which are in the cache only."""
    depths, num_nodes, num_last = [0, 1, 1, 2, 2, 2, 2], 7, 4
    mask = torch.eye(num_nodes, dtype=torch.bool)
    for node, parent in enumerate([-1, 0, 0, 1, 1, 2, 2]):
        if parent >= 0:
            mask[node] |= mask[parent]
    prefixes = [60, 2, 16]
    gen = generator(4)
    lens = [prefix + num_nodes for prefix in prefixes]
    kv, contexts, _ = paged(lens, 16, 1, 32, torch.float32, guarded, gen)
    positions = guarded(torch.tensor([[prefix + at for at in depths] for prefix in prefixes]).int().flatten())
    slopes = None if window is None else torch.tensor([0.3, 0.1, 0.2][:num_heads])
    options = AttentionOptions(window=window, alibi_slopes_H=slopes)
    q = torch.randn(3, num_nodes, num_heads, 32, generator=gen)
    none = torch.zeros(3, dtype=torch.int32)
    whole = DraftTree(guarded(mask.flatten().view(torch.uint8)).view(torch.bool), none, positions)
    expected = prefill_attention_reference(
        q.flatten(0, 1), kv, contexts, chunks_of([num_nodes] * 3), options, tree=whole
    ).view_as(q)[:, -num_last:]
    bits = guarded(mask[-num_last:].flatten().view(torch.uint8)).view(torch.bool)
    level = DraftTree(bits, none, positions, num_before=num_nodes - num_last)
    args = (q[:, -num_last:].flatten(0, 1), kv, contexts, chunks_of([num_last] * 3), options)
    expected = expected.flatten(0, 1)
    assert_close(prefill_attention_reference(*args, tree=level), expected, terms=4)
    assert_close(prefill_attention(*args, tree=level, num_ranges=num_ranges), expected, terms=4)


@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_kv(kv_dtype, guarded, generator, assert_close):
    gen = generator(4)
    shape = (8, 16, 2, 32)
    stored = [torch.randint(-100, 100, shape, generator=gen).float().to(kv_dtype) for _ in range(2)]
    scales = [torch.rand(shape[:3], generator=gen) / 50 for _ in range(2)]
    tables = torch.tensor([[3, 5, 1], [2, 7, 4]], dtype=torch.int32)
    q = torch.randn(24, 6, 32, generator=gen)
    kv = PagedKv(*map(guarded, (*stored, *scales)))
    step = Contexts(tables, torch.tensor([41, 15]).int(), 41), chunks_of([9, 15])
    wide = [cache.float() * scale[..., None] for cache, scale in zip(stored, scales, strict=True)]
    expected = prefill_attention_reference(q, PagedKv(*wide), *step)
    assert_close(prefill_attention_reference(q, kv, *step), expected, terms=16)
    assert_close(prefill_attention(q, kv, *step), expected, terms=16)


def test_rows_of_no_sequence_are_not_written_and_decode_agrees(guarded, generator, assert_close):
    """A captured batch: padded tokens stay as they are; a decode row is as from the decode kernel."""
    gen = generator(5)
    kv, contexts, _ = paged([33, 7], 16, 2, 64, torch.float32, guarded, gen)
    q = torch.randn(5, 4, 64, generator=gen)
    out = torch.full_like(q, 7.0)
    prefill_attention(q, kv, contexts, chunks_of([1, 1]), out_THD=out)
    assert (out[2:] == 7.0).all()
    assert_close(out[:2], decode_attention(q[:2], kv, contexts), terms=4)


def test_refusals_say_what_is_supported():
    q = torch.zeros(2, 64, 64)
    cache = torch.zeros(2, 16, 1, 64)
    tables, lens = torch.ones(1, 1, dtype=torch.int32), torch.full((1,), 2, dtype=torch.int32)

    def call(starts=(0, 2), q=q, tree=None, **options):
        chunks = Chunks(torch.tensor(starts, dtype=torch.int32), 2)
        kv, contexts = PagedKv(cache, cache), Contexts(tables, lens, 2)
        return prefill_attention(q, kv, contexts, chunks, AttentionOptions(**options), tree=tree)

    mask, mask_start = torch.ones(4, dtype=torch.bool), torch.zeros(1, dtype=torch.int32)
    for match, wrong in (
        ("64 query heads per KV head: must be at most", {}),
        ("must be one table per sequence, and one start more", {"starts": (0, 1, 2)}),
        ("torch.bool", {"tree": DraftTree(mask.int(), mask_start)}),
        ("mask_start_B: must be torch.int32", {"tree": DraftTree(mask, mask_start.long())}),
        (
            "positions_T: must be torch.int32 with a window",
            {"tree": DraftTree(mask, mask_start), "window": 3},
        ),
        ("head_dim 40", {"q": torch.zeros(2, 4, 40)}),
    ):
        with pytest.raises(ValueError, match=match):
            call(**wrong)
