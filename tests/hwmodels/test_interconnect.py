"""Collectives against the closed forms and worked numbers of their docstrings."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.interconnect import Link, ring_all_gather, ring_all_reduce, tree_all_reduce

NVLINK = Link(name="NVLink 4", bandwidth_bytes_per_s=450e9, latency_s=0.8e-6)


def test_ring_all_reduce_matches_its_worked_number():
    assert ring_all_reduce(NVLINK, 8, 0.7).seconds(64 * 2**20) == pytest.approx(384.0e-6, abs=0.1e-6)


def test_tree_all_reduce_matches_its_worked_number():
    assert tree_all_reduce(NVLINK, 8, 0.7).seconds(8192) == pytest.approx(4.85e-6, abs=0.01e-6)
    assert ring_all_reduce(NVLINK, 8, 0.7).seconds(8192) == pytest.approx(11.25e-6, abs=0.01e-6)


def test_small_messages_are_faster_by_tree_and_large_ones_by_ring():
    ring, tree = ring_all_reduce(NVLINK, 8), tree_all_reduce(NVLINK, 8)
    assert tree.seconds(8192) < ring.seconds(8192)
    assert ring.seconds(2**28) < tree.seconds(2**28)


def test_an_all_gather_is_half_an_all_reduce_on_a_ring():
    assert 2 * ring_all_gather(NVLINK, 8).seconds(1e6) == pytest.approx(
        ring_all_reduce(NVLINK, 8).seconds(1e6)
    )


@given(st.lists(st.integers(0, 2**34), min_size=1, max_size=20), st.integers(2, 64))
def test_arrays_are_priced_as_numbers_are(sizes, num_ranks):
    for pattern in (ring_all_reduce, tree_all_reduce, ring_all_gather):
        transfer = pattern(NVLINK, num_ranks)
        many = transfer.seconds(np.array(sizes, dtype=float))
        assert many.tolist() == [transfer.seconds(float(size)) for size in sizes]


@given(st.integers(0, 2**30), st.integers(2, 64))
def test_an_all_reduce_never_beats_the_wire(num_bytes, num_ranks):
    """No algorithm sends less than 2 (p - 1)/p of the message a rank (Patarasuk, Yuan, 2009)."""
    wire_s = 2 * (num_ranks - 1) / num_ranks * num_bytes / NVLINK.bandwidth_bytes_per_s
    for pattern in (ring_all_reduce, tree_all_reduce):
        assert pattern(NVLINK, num_ranks).seconds(num_bytes) >= wire_s


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"bandwidth_bytes_per_s": 0.0}, "bandwidth_bytes_per_s=0.0: must be a finite number > 0 bytes/s"),
        (
            {"bandwidth_bytes_per_s": math.inf},
            "bandwidth_bytes_per_s=inf: must be a finite number > 0 bytes/s",
        ),
        (
            {"bandwidth_bytes_per_s": math.nan},
            "bandwidth_bytes_per_s=nan: must be a finite number > 0 bytes/s",
        ),
        ({"latency_s": -1e-6}, "latency_s=-1e-06: must be a finite number >= 0 s"),
        ({"latency_s": math.nan}, "latency_s=nan: must be a finite number >= 0 s"),
    ],
)
def test_link_rejects_impossible_figures(given_settings, message):
    with pytest.raises(ValueError, match=message):
        Link(**{"name": "x", "bandwidth_bytes_per_s": 1e9, "latency_s": 1e-6, **given_settings})
