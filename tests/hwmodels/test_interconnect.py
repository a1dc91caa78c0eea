"""Collectives against the closed forms and worked numbers of their docstrings."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.interconnect import (
    Link,
    all_reduce_s,
    ring_all_gather,
    ring_all_reduce,
    send_recv_s,
    tree_all_reduce,
)

NVLINK = Link(name="NVLink 4", bandwidth_bytes_per_s=450e9, latency_s=0.8e-6)
PCIE = Link(name="PCIe 5.0 x16", bandwidth_bytes_per_s=64e9, latency_s=2.5e-6)


def test_ring_all_reduce_matches_its_worked_number():
    assert ring_all_reduce(NVLINK, 8, 0.7).seconds(64 * 2**20) == pytest.approx(384.0e-6, abs=0.1e-6)


def test_tree_all_reduce_matches_its_worked_number():
    assert tree_all_reduce(NVLINK, 8, 0.7).seconds(8192) == pytest.approx(4.85e-6, abs=0.01e-6)
    assert ring_all_reduce(NVLINK, 8, 0.7).seconds(8192) == pytest.approx(11.25e-6, abs=0.01e-6)


def test_send_recv_matches_its_worked_number():
    assert send_recv_s(16 * 2**20, PCIE, 0.7) == pytest.approx(377.0e-6, abs=0.1e-6)


def test_small_messages_take_the_tree_and_large_ones_the_ring():
    assert all_reduce_s(8192, NVLINK, 8) == tree_all_reduce(NVLINK, 8).seconds(8192)
    assert all_reduce_s(2**28, NVLINK, 8) == ring_all_reduce(NVLINK, 8).seconds(2**28)


def test_an_all_gather_is_half_an_all_reduce_on_a_ring():
    assert 2 * ring_all_gather(NVLINK, 8).seconds(1e6) == pytest.approx(
        ring_all_reduce(NVLINK, 8).seconds(1e6)
    )


def test_a_single_rank_has_nothing_to_reduce():
    assert all_reduce_s(1e6, NVLINK, 1) == 0
    assert all_reduce_s(np.array([1e3, 1e6]), NVLINK, 1).tolist() == [0, 0]


@given(st.lists(st.integers(0, 2**34), min_size=1, max_size=20), st.integers(2, 64))
def test_arrays_are_priced_as_numbers_are(sizes, num_ranks):
    many = all_reduce_s(np.array(sizes, dtype=float), NVLINK, num_ranks)
    assert many.tolist() == [all_reduce_s(float(size), NVLINK, num_ranks) for size in sizes]


@given(st.integers(0, 2**30), st.integers(2, 64))
def test_an_all_reduce_never_beats_the_wire(num_bytes, num_ranks):
    """No algorithm sends less than 2 (p - 1)/p of the message a rank (Patarasuk, Yuan, 2009)."""
    wire_s = 2 * (num_ranks - 1) / num_ranks * num_bytes / NVLINK.bandwidth_bytes_per_s
    assert all_reduce_s(num_bytes, NVLINK, num_ranks) >= wire_s


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"bandwidth_bytes_per_s": 0.0}, "bandwidth_bytes_per_s=0.0: must be > 0 bytes/s"),
        ({"latency_s": -1e-6}, "latency_s=-1e-06: must be >= 0 s"),
    ],
)
def test_link_rejects_impossible_figures(given_settings, message):
    with pytest.raises(ValueError, match=message):
        Link(**{"name": "x", "bandwidth_bytes_per_s": 1e9, "latency_s": 1e-6, **given_settings})
