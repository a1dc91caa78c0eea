"""Collectives on a torus agree with closed forms and with a simulation of rings over each axis."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.assembly.roofline import Roofline
from hwmodels.device import Torus
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.operators.collectives import CollectiveCurve, block_of, torus_seconds

CURVE = CollectiveCurve(start_s=1e-12, bandwidth_share=1.0)


@pytest.fixture
def on(devices):
    """Makes a device with 600e9 bytes/s on 2 links per axis and no latency."""

    def make(axes, wraps_from=4, latency_s=0.0):
        base = devices["tpu_v5p"]
        link = replace(
            base.link,
            bandwidth_bytes_per_s=600e9,
            latency_s=latency_s,
            torus=Torus(axes=axes, wraps_from=wraps_from),
        )
        return replace(base, scale_up=link)

    return make


def test_blocks_are_as_cubic_as_possible():
    sizes = {
        (ranks, axes): tuple(axis.size for axis in block_of(ranks, Torus(axes=axes, wraps_from=4)))
        for ranks, axes in [(8, 2), (8, 3), (16, 2), (6, 2), (64, 3), (7, 3), (1, 2)]
    }
    assert sizes == {
        (8, 2): (2, 4),
        (8, 3): (2, 2, 2),
        (16, 2): (4, 4),
        (6, 2): (2, 3),
        (64, 3): (4, 4, 4),
        (7, 3): (7,),
        (1, 2): (),
    }


@given(st.integers(1, 512), st.integers(1, 3))
def test_blocks_hold_all_ranks(ranks, axes):
    block = block_of(ranks, Torus(axes=axes, wraps_from=4))
    assert np.prod([axis.size for axis in block], initial=1) == ranks
    assert len(block) <= axes


def test_all_reduce_over_each_axis_matches_theory(on):
    """A 4 x 4 torus: 2 x 15/16 of the bytes over four links of 150e9 bytes/s."""
    seconds = torus_seconds("all_reduce", 64e6, 16, on(2), CURVE)
    assert seconds == pytest.approx(2 * 15 / 16 * 64e6 / (4 * 150e9))


def test_all_reduce_equals_rings_over_the_axes_one_after_the_other(on):
    """One part of the message per axis, each reduced along one axis after the other, in all orders at once.

    4 x 4 x 4: along the first axis a part of n / 3 moves 3/4 of itself, then a quarter as much, then a
    sixteenth; every phase of a part has the two links of its axis alone.
    """
    part, per_axis = 96e6 / 3, 2 * 100e9
    phases_s = sum(part / 4**phase * 3 / 4 / per_axis for phase in range(3))
    seconds = torus_seconds("all_reduce", 96e6, 64, on(3), CURVE)
    assert seconds == pytest.approx(2 * phases_s)


def test_lines_have_half_the_bandwidth_of_rings(on):
    ring = torus_seconds("all_gather", 1e6, 16, on(2, wraps_from=4), CURVE)
    line = torus_seconds("all_gather", 1e6, 16, on(2, wraps_from=16), CURVE)
    assert line == pytest.approx(2 * ring)


def test_a_ring_gathers_in_the_time_of_its_slowest_link(on):
    """Steps of a two-way ring of 8, simulated: a rank's shard goes 3.5 hops each way on average."""
    shard, link = 1e6, 300e9
    sent_s = 0.0
    for step in range(4):
        whole = step < 3  # the opposite rank gets a half from each side
        sent_s += (shard if whole else shard / 2) / link
    seconds = torus_seconds("all_gather", 8 * shard, 8, on(1), CURVE)
    assert seconds == pytest.approx(sent_s)


def test_all_to_all_is_bound_by_the_middle(on):
    """8 ranks in a ring: across the two links of the middle, each way, go 4 x 4 of 64 parts."""
    own = 8e6
    crossing = 4 * 4 * own / 8
    seconds = torus_seconds("all_to_all", own, 8, on(1), CURVE)
    assert seconds == pytest.approx(crossing / (2 * 300e9))
    line = torus_seconds("all_to_all", own, 8, on(1, wraps_from=16), CURVE)
    assert line == pytest.approx(crossing / 300e9)


def test_latency_is_that_of_the_longest_path(on):
    device = on(2, latency_s=1e-6)
    assert torus_seconds("all_gather", 1, 16, device, CURVE) == pytest.approx(4e-6, rel=1e-3)
    assert torus_seconds("all_reduce", 1, 16, device, CURVE) == pytest.approx(8e-6, rel=1e-3)
    assert torus_seconds("send_recv", 1, 16, device, CURVE) == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize("collective", ["all_reduce", "all_gather", "all_to_all", "send_recv"])
def test_one_rank_and_no_bytes_take_no_time(on, collective):
    assert torus_seconds(collective, 1e6, 1, on(2), CURVE) == 0
    assert torus_seconds(collective, 0, 16, on(2), CURVE) == 0


def test_worked_number_of_the_docstring(devices):
    """1 MB on 2 x 4 chips of a TPU v5e, lines: 8.75 us and 4 hops of 1 us."""
    seconds = torus_seconds("all_gather", 1e6, 8, devices["tpu_v5e"], CURVE)
    assert seconds == pytest.approx(8.75e-6 + 4e-6)


def test_messages_of_a_replica_use_the_torus(models, devices, make_shape):
    """Half the links' bandwidth lengthens the messages of a prompt, and nothing else."""
    layout, device = ParallelLayout(tensor_parallel_size=8), devices["tpu_v5p"]
    slower = replace(device, scale_up=replace(device.scale_up, bandwidth_bytes_per_s=300e9))
    fast, slow = (
        Roofline(model=models["llama3_1_70b"], device=each, layout=layout).breakdown(
            make_shape(chunks=[(2048, 0)])
        )
        for each in (device, slower)
    )
    assert slow["communication"] > 1.5 * fast["communication"]
    assert slow["gemm"] == fast["gemm"]


@pytest.mark.parametrize("axes", [0, 4])
def test_rejects_other_numbers_of_axes(axes):
    with pytest.raises(ValueError, match=f"axes={axes}: must be one of 1, 2, 3"):
        Torus(axes=axes, wraps_from=4)
