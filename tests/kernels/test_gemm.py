"""The number of splits of K of decode GEMMs, for the shapes of Llama-3.1-8B in 4 bits on an H200."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels import gemm
from kernels.gemm import MAX_SPLITS, PROGRAMS, parts_of_k, splits_of_k
from kernels.launch import compiling_for


def longest(num_tiles, num_k_blocks, splits):
    """Returns the K-blocks that run one after another until the last of the programs ends."""
    blocks = -(-num_k_blocks // splits)
    programs = num_tiles * -(-num_k_blocks // blocks)
    return -(-programs // PROGRAMS["sm_90"]) * blocks


@pytest.fixture(autouse=True)
def on_sm_90():
    with compiling_for("sm_90", lambda kernel, grid, args, meta: None):
        yield


@pytest.mark.parametrize(
    ("num_tiles", "num_k_blocks", "splits", "blocks"),
    [(48, 32, 5, 7), (32, 32, 8, 4), (224, 32, 1, 32), (32, 112, 8, 14)],
    ids=["qkv", "o", "gate_up", "down"],
)
def test_programs_of_an_8b_model_fit_into_one_wave(num_tiles, num_k_blocks, splits, blocks):
    assert splits_of_k(num_tiles, num_k_blocks) == splits
    assert num_tiles * splits <= PROGRAMS["sm_90"]
    assert longest(num_tiles, num_k_blocks, splits) == blocks
    ideal = num_tiles * num_k_blocks / PROGRAMS["sm_90"]
    assert blocks <= 1.25 * ideal


@given(num_tiles=st.integers(0, 600), num_k_blocks=st.integers(1, 200))
def test_no_number_of_splits_is_much_faster(num_tiles, num_k_blocks):
    splits = splits_of_k(num_tiles, num_k_blocks)
    most = min(max(num_k_blocks // 4, 1), MAX_SPLITS)
    assert 1 <= splits <= most
    best = min(longest(max(num_tiles, 1), num_k_blocks, other) for other in range(1, most + 1))
    assert longest(max(num_tiles, 1), num_k_blocks, splits) <= best + gemm.SUM_BLOCKS
    found, blocks_per_split = parts_of_k(num_tiles, num_k_blocks, None)
    assert (found - 1) * blocks_per_split < num_k_blocks <= found * blocks_per_split
