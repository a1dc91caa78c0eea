from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.block_copy import (
    CacheSet,
    copy_blocks,
    copy_blocks_reference,
    gather_blocks,
    gather_blocks_reference,
    scatter_blocks,
    scatter_blocks_reference,
)

NUM_BLOCKS = 9
# 16-byte blocks and odd ones, one larger than a program's tile.
SHAPES = st.sampled_from([(1, 1, 2), (4, 3, 10), (16, 3), (16, 3, 64), (16, 8, 266)])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
drawn = given(
    shape=SHAPES,
    dtype=DTYPES,
    num_tensors=st.integers(1, 4),
    count=st.integers(0, 4),
    seed=st.integers(0, 99),
)
few = settings(max_examples=12)


def make_caches(shape, dtype, num_tensors, random, guarded):
    tensors = [
        torch.randn(NUM_BLOCKS, *shape, generator=random).mul(30).to(dtype) for _ in range(num_tensors)
    ]
    return [CacheSet.of([guarded(x) for x in tensors]) for _ in range(2)]


def whole_words(shape, dtype):
    return torch.Size(shape).numel() * dtype.itemsize % 4 == 0


def assert_equal_bytes(ours, expected):
    for x, y in zip(ours, expected, strict=True):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


@few
@drawn
def test_copy_matches_reference(shape, dtype, num_tensors, count, seed, generator, guarded):
    if not whole_words(shape, dtype):
        return
    random = generator(seed)
    ours, expected = make_caches(shape, dtype, num_tensors, random, guarded)
    pairs = guarded(torch.randperm(NUM_BLOCKS, generator=random)[: 2 * count].reshape(count, 2).int())
    copy_blocks(ours, pairs)
    copy_blocks_reference(expected, pairs)
    assert_equal_bytes(ours.tensors, expected.tensors)


@few
@drawn
def test_gather_and_scatter_match_reference(shape, dtype, num_tensors, count, seed, generator, guarded):
    if not whole_words(shape, dtype):
        return
    random = generator(seed)
    ours, expected = make_caches(shape, dtype, num_tensors, random, guarded)
    blocks = guarded(torch.randperm(NUM_BLOCKS, generator=random)[:count])
    stagings = [guarded(torch.zeros_like(ours.staging(count + 1), dtype=dtype)) for _ in range(2)]
    gather_blocks(ours, blocks, stagings[0])
    gather_blocks_reference(expected, blocks, stagings[1])
    assert_equal_bytes(stagings[:1], stagings[1:])
    other = torch.randperm(NUM_BLOCKS, generator=random)[:count].int()
    scatter_blocks(stagings[0], other, ours)
    scatter_blocks_reference(stagings[1], other, expected)
    assert_equal_bytes(ours.tensors, expected.tensors)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda c: CacheSet.of([]), "no cache tensors"),
        (lambda c: CacheSet.of([torch.ones(2, 3, dtype=torch.int8)]), "multiple of 4"),
        (
            lambda c: CacheSet.of([torch.ones(2, 4), torch.ones(3, 4)]),
            "must have the same dtype, shape and device",
        ),
        (lambda c: CacheSet.of([torch.ones(4, 2).t()]), "contiguous"),
        (lambda c: copy_blocks(c, torch.ones(3, 3, dtype=torch.int32)), r"\[N, 2\]"),
        (lambda c: gather_blocks(c, torch.ones(3), c.staging(3)), "int32 or int64"),
        (
            lambda c: gather_blocks(c, torch.tensor([1, 2]), c.staging(1)),
            "staging of 1 blocks: must have at least 2",
        ),
        (lambda c: scatter_blocks(torch.ones(2, 2), torch.tensor([1]), c), "staging"),
    ],
)
def test_block_copies_reject(call, said):
    caches = CacheSet.of([torch.ones(4, 8)])
    with pytest.raises(ValueError, match=said):
        call(caches)
