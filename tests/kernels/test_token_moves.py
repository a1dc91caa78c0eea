from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.block_copy import CacheSet
from kernels.token_moves import move_tokens, move_tokens_reference

BLOCK_SIZE = 4


@settings(max_examples=15)
@given(
    shape=st.sampled_from([(1, 2), (3, 10), (3,), (3, 64), (8, 266)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]),
    num_tensors=st.integers(1, 3),
    num_seqs=st.integers(0, 3),
    depth=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_moves_along_a_path_match_what_was_there(
    shape, dtype, num_tensors, num_seqs, depth, seed, generator, guarded
):
    """Node slots of each sequence grow, and so later nodes move into the slots of earlier ones."""
    if torch.Size(shape).numel() * dtype.itemsize % 4:
        return
    random = generator(seed)
    blocks = 3 * num_seqs + 1
    tensors = [
        torch.randn(blocks, BLOCK_SIZE, *shape, generator=random).mul(30).to(dtype)
        for _ in range(num_tensors)
    ]
    order = torch.randperm(3 * num_seqs, generator=random).view(num_seqs, 3) + 1  # blocks of each sequence
    places = torch.arange(1, depth + 1)
    sources, destinations = (torch.zeros(num_seqs, depth, dtype=torch.int64) for _ in range(2))
    for seq in range(num_seqs):
        nodes = torch.randperm(11, generator=random)[:depth].sort().values + 1
        for out, at in ((sources, nodes), (destinations, places)):
            out[seq] = order[seq][at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
    skipped = torch.rand(num_seqs, depth, generator=random) < 0.2
    sources[skipped] = -1
    expected = [x.clone() for x in tensors]
    for x, y in zip(tensors, expected, strict=True):
        x_bytes, y_bytes = (z.view(torch.uint8).flatten(0, 1) for z in (x, y))
        y_bytes[destinations[~skipped]] = x_bytes[sources[~skipped]]
    for move in (move_tokens, move_tokens_reference):
        caches = CacheSet.of([guarded(x) for x in tensors])
        move(caches, guarded(sources), guarded(destinations))
        for x, y in zip(caches.tensors, expected, strict=True):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@pytest.mark.parametrize("move", [move_tokens, move_tokens_reference])
def test_pairs_are_moved_in_order(move):
    """Slot 2 to 1 and then 1 to 0 carries one token through; other sequences and skipped pairs stay."""
    cache = torch.arange(8, dtype=torch.float32).view(2, 4, 1)
    caches = CacheSet.of([cache])
    move(caches, torch.tensor([[2, 1, 3], [5, -1, 6]]), torch.tensor([[1, 0, 3], [4, 7, -1]]))
    assert cache.flatten().tolist() == [2.0, 2.0, 2.0, 3.0, 5.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize(
    ("cache", "source", "destination", "said"),
    [
        (torch.ones(2, 4), torch.ones(1, 2), torch.ones(1, 2), "sources_BD: torch.float32"),
        (torch.ones(2, 4), torch.ones(1, 2).long(), torch.ones(1, 3).long(), "destinations_BD"),
        (torch.ones(2, 4, dtype=torch.int8), torch.ones(1, 1).long(), torch.ones(1, 1).long(), "tokens of 1"),
    ],
)
def test_move_tokens_rejects(cache, source, destination, said):
    with pytest.raises(ValueError, match=said):
        move_tokens(CacheSet.of([cache]), source, destination)
