"""The ranges of an even split against a plain computation, and the work of the largest range."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels import even_split as module
from kernels.attention import Contexts, shared_split
from kernels.decode_attention import decode_attention
from kernels.even_split import even_split, num_ranges_of
from kernels.prefill_attention import Chunks, DraftTree, prefill_attention
from tests.examples import examples
from tests.kernels.paged_kv import paged


def tiles_seen(first, last, window, block_n):
    """Returns the number of key tiles between the first query's oldest key and the last query's own."""
    start = 0 if window is None else max(first - window + 1, 0)
    return max(-(-(last + 1) // block_n) - start // block_n, 1)


def expected_table(tiles, num_ranges):
    starts = [sum(tiles[:unit]) for unit in range(len(tiles) + 1)]
    size = max(-(-starts[-1] // num_ranges), 1)
    first = [
        max(unit for unit, start in enumerate(starts) if start <= min(index * size, starts[-1]))
        for index in range(num_ranges)
    ]
    return [*starts, *first, size]


@examples(8, 25)
@given(
    lens=st.lists(st.integers(0, 3000), min_size=1, max_size=40),
    num_ranges=st.integers(1, 50),
    block_n=st.sampled_from([16, 32, 64]),
    window=st.sampled_from([None, 1, 100]),
)
def test_the_tiles_of_all_sequences_are_split_evenly(lens, num_ranges, block_n, window, guarded):
    split = even_split(guarded(torch.tensor(lens, dtype=torch.int32)), num_ranges, block_n, window)
    tiles = [tiles_seen(length - 1, length - 1, window, block_n) for length in lens]
    assert split.table.tolist() == expected_table(tiles, num_ranges)


@examples(6, 15)
@given(
    chunks=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 500)), min_size=1, max_size=12),
    num_ranges=st.integers(1, 20),
    window=st.sampled_from([None, 40]),
    is_tree=st.booleans(),
)
def test_the_tiles_of_chunks_are_split_evenly(chunks, num_ranges, window, is_tree, guarded):
    block_q, block_n, start, tiles = 5, 16, 0, []
    starts = torch.tensor([0, *(count for count, _ in chunks)]).cumsum(0).int()
    num_units = int(starts[-1]) // block_q + len(chunks)
    for seq, (count, prefix) in enumerate(chunks):
        tiles += [1] * (start // block_q + seq - len(tiles))  # units between two chunks have no queries
        for query in range(0, count, block_q):
            first, last = (0, count - 1) if is_tree else (query, min(query + block_q, count) - 1)
            tiles.append(tiles_seen(prefix + first, prefix + last, window, block_n))
        start += count
    tiles += [1] * (num_units - len(tiles))
    lens = torch.tensor([count + prefix for count, prefix in chunks], dtype=torch.int32)
    split = even_split(
        guarded(lens),
        num_ranges,
        block_n,
        window,
        query_start_loc=guarded(starts),
        block_q=block_q,
        num_units=num_units,
        is_tree=is_tree,
    )
    assert split.table.tolist() == expected_table(tiles, num_ranges)


def test_one_long_context_among_short_ones_is_no_straggler(monkeypatch):
    """Llama-3.1-8B on an H200: 132 multiprocessors with 4 programs each, 8 KV heads, tiles of 32 keys."""
    monkeypatch.setattr(module, "sm_count", lambda device: 132)
    num_ranges = num_ranges_of(None, 8, 4, torch.device("cpu"))
    lens = torch.tensor([32768] + [1024] * 63, dtype=torch.int32)
    size = int(even_split(lens, num_ranges, 32, None).table[-1])
    assert num_ranges == 66
    assert size * 32 == 1504  # keys of the largest program; a program per sequence would have 32,768
    assert size * 32 <= 1.05 * int(lens.sum()) / num_ranges


def test_units_beyond_a_block_are_counted_on(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_UNITS", 16)
    lens = torch.arange(1, 2400, 31, dtype=torch.int32)
    tiles = [-(-length // 32) for length in lens.tolist()]
    assert even_split(lens, 100, 32, None).table.tolist() == expected_table(tiles, 100)


def test_layers_share_the_split_of_a_step():
    contexts = Contexts(torch.zeros(2, 1).int(), torch.tensor([40, 3]).int(), 40, {})
    full = shared_split(contexts, 4, 16, None)
    assert shared_split(contexts, 4, 16, None) is full
    assert shared_split(contexts, 4, 16, 8) is not full
    alone = contexts._replace(splits=None)
    assert shared_split(alone, 4, 16, None) is not full


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("is_tree", [False, True])
def test_queries_that_verify_drafts_have_the_same_output_for_every_split(
    is_tree, guarded, generator, assert_close
):
    """Sequences of very different lengths, each with the same number of rows."""
    gen, lens, rows = generator(5), [5, 300, 9, 70], 5
    kv, contexts, _ = paged(lens, 16, 2, 32, torch.float32, guarded, gen)
    q = torch.randn(len(lens) * rows, 4, 32, generator=gen)
    chunks = Chunks(torch.arange(0, rows * len(lens) + 1, rows).int(), rows)
    tree = None
    if is_tree:
        mask = torch.ones(rows, rows).tril().bool().repeat(len(lens), 1)
        tree = DraftTree(mask, torch.arange(0, rows * rows * len(lens), rows * rows).int())
    causal = prefill_attention(q, kv, contexts._replace(max_len=1), chunks)
    for num_ranges in (None, 3, 9):
        assert_close(
            prefill_attention(q, kv, contexts, chunks, tree=tree, num_ranges=num_ranges), causal, terms=4
        )
    last = torch.arange(rows - 1, len(q), rows)
    assert_close(decode_attention(q[last], kv, contexts, num_ranges=11), causal[last], terms=4)
