"""Prices of collectives against hand calculations, and laws that any price obeys."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.device import Link
from hwmodels.operators.collectives import COLLECTIVES, CollectiveCurve, collective_seconds

PRICES = [partial(collective_seconds, name) for name in COLLECTIVES]
all_reduce_seconds, all_gather_seconds, _, all_to_all_seconds, send_recv_seconds = PRICES
CURVE = CollectiveCurve(start_s=5e-6, hop_s=1e-6, bandwidth_share=0.8, direct_start_s=4e-6)
MIB = 2**20

prices = st.sampled_from(PRICES)
kernels = st.sampled_from(["vllm", "trtllm", "nccl"])
ranks = st.sampled_from([2, 4, 8])
presets = st.sampled_from(["a100_80gb_sxm", "h100_sxm", "rtx_pro_6000_server"])
sizes = st.integers(1, 2**31)


@pytest.fixture(scope="module")
def h100(devices):
    """Returns an H100 with 450e9 bytes/s and multicast in a node, 50e9 bytes/s and 10 us between nodes."""
    inside = Link(name="NVLink 4", bandwidth_bytes_per_s=450e9, latency_s=0.8e-6, multicast=True)
    between = Link(name="InfiniBand NDR", bandwidth_bytes_per_s=50e9, latency_s=10e-6)
    return replace(devices["h100_sxm"], scale_up=inside, inter_node=between)


def test_two_shot_all_reduce_matches_its_worked_number(h100):
    assert all_reduce_seconds(2**18, 8, h100, CollectiveCurve()) == pytest.approx(9.51e-6, abs=0.01e-6)


def test_one_shot_all_reduce_matches_hand_calculation(h100):
    # 0.68 x 4 us + 3 x 4,096 / (450e9 x 0.8 x 0.76)
    assert all_reduce_seconds(4096, 4, h100, CURVE, kernels="trtllm") == pytest.approx(2.765e-6, rel=1e-3)


def test_a_ring_of_small_messages_matches_hand_calculation(h100):
    # 5 us + 3 hops + 2.3 x (3 + 0.4)/4 x 1,000 / 360e9
    assert all_gather_seconds(1000, 4, h100, CURVE) == pytest.approx(8.0054e-6, rel=1e-4)


def test_a_ring_of_large_messages_matches_hand_calculation(h100):
    # 5 us + 6 hops + 17 us + (6 + 0.4)/4 x 1e9 / 360e9
    seconds = all_reduce_seconds(1e9, 4, h100, CURVE, kernels="nccl")
    assert seconds == pytest.approx(28e-6 + 1.6e9 / 360e9, rel=1e-6)


def test_switches_that_add_up_save_bandwidth_at_eight_ranks(h100):
    ring_only = replace(h100, scale_up=replace(h100.scale_up, multicast=False))
    by_switch, by_ring = (all_reduce_seconds(1e9, 8, d, CURVE, kernels="nccl") for d in (h100, ring_only))
    # 1 + 1/8 at 0.7 of the bandwidth, against (14 + 0.4)/8
    assert by_ring - by_switch == pytest.approx((14.4 / 8 - 1.125 / 0.7) * 1e9 / 360e9, rel=1e-6)
    assert all_reduce_seconds(1e9, 4, h100, CURVE) == all_reduce_seconds(1e9, 4, ring_only, CURVE)


def test_an_all_to_all_matches_hand_calculation(h100):
    # 5 us + (1 + 3) hops + 5 us + (7 + 0.4)/8 x 1e9 / (360e9 x 0.87)
    seconds = all_to_all_seconds(1e9, 8, h100, CURVE)
    assert seconds == pytest.approx(14e-6 + 0.925e9 / (360e9 * 0.87), rel=1e-6)


def test_a_message_to_the_next_stage_matches_hand_calculation(h100):
    assert send_recv_seconds(1e9, 2, h100, CURVE) == pytest.approx(11e-6 + 1e9 / 360e9, rel=1e-6)


def test_over_pcie_more_than_two_ranks_share_the_host_bridges(devices):
    device = devices["rtx_pro_6000_server"]
    reached = device.pcie.bandwidth_bytes_per_s * CURVE.bandwidth_share
    two, four = (all_gather_seconds(1e9, p, device, CURVE) for p in (2, 4))
    assert two == pytest.approx(23e-6 + 1.4 / 2 * 1e9 / reached, rel=1e-6)
    assert four == pytest.approx(25e-6 + 3.4 / 4 * 1e9 / (0.55 * reached), rel=1e-6)


def test_over_pcie_engines_leave_more_than_two_ranks_to_nccl(devices):
    device = devices["rtx_pro_6000_server"]
    two, four = (
        [all_reduce_seconds(4096, p, device, CURVE, kernels=k) for k in ("vllm", "nccl")] for p in (2, 4)
    )
    assert two[0] < two[1]
    assert four[0] == four[1]


def test_without_peer_access_host_memory_stages_messages(devices):
    peers = devices["rtx_pro_6000_server"]
    staged = replace(peers, pcie=replace(peers.pcie, peer_to_peer=False))
    reached = 0.73 * peers.pcie.bandwidth_bytes_per_s * CURVE.bandwidth_share
    # 5 us + 6 hops of 1.65 us + 17 us + (6 + 0.4)/4 x 1e9 bytes, over bridges that four ranks share
    four = all_reduce_seconds(1e9, 4, staged, CURVE)
    assert four == pytest.approx(31.9e-6 + 1.6e9 / (0.55 * reached), rel=1e-6)
    # vLLM's own kernel maps memory of its peers, so that two ranks use NCCL as well.
    assert all_reduce_seconds(4096, 2, staged, CURVE) == all_reduce_seconds(
        4096, 2, staged, CURVE, kernels="nccl"
    )
    assert all_reduce_seconds(4096, 2, peers, CURVE) < all_reduce_seconds(4096, 2, staged, CURVE)


def test_only_the_geforce_of_the_presets_lacks_peer_access(devices):
    staged = {name for name, device in devices.items() if not device.link.peer_to_peer}
    assert staged == {"rtx_3090", "rtx_4090", "rtx_5090"}


def test_geforce_reaches_the_published_rates_of_all_reduces(devices):
    """Two RTX 4090: 16e9 bytes/s. Eight, 8 bytes: 42 us (NVIDIA/nccl issue 1530)."""
    device, curve = devices["rtx_4090"], CollectiveCurve(start_s=5.1e-6, hop_s=1.6e-6)
    assert 2**30 / all_reduce_seconds(2**30, 2, device, curve) == pytest.approx(16e9, rel=0.2)
    assert all_reduce_seconds(8, 8, device, curve) == pytest.approx(42e-6, rel=0.05)


def test_vllm_leaves_8_mib_and_more_to_nccl_without_multicast(devices):
    device = devices["a100_80gb_sxm"]
    own, nccl = (
        [all_reduce_seconds(size, 8, device, CURVE, kernels=k) for size in (8 * MIB - 1, 8 * MIB)]
        for k in ("vllm", "nccl")
    )
    assert own[0] < nccl[0]
    assert own[1] == nccl[1]


def test_outside_a_graph_vllm_copies_the_tensor_first(h100):
    extra = all_reduce_seconds(1e9, 8, h100, CURVE, eager=True) - all_reduce_seconds(1e9, 8, h100, CURVE)
    assert extra == pytest.approx(2e9 / (0.9 * 3.35e12), rel=1e-6)


def test_chunks_pass_the_links_inside_and_between_nodes_in_a_pipeline(h100):
    # Between: 2 hops of 10 us; 2 x (1/2) x 1e9 / 8 bytes over 40e9 bytes/s. Inside: 14 hops of 1 us; the
    # switch adds up: 1.125 / 0.7 x 1e9 / 360e9 = 4.46 ms, more than 3.13 ms between.
    seconds = all_reduce_seconds(1e9, 16, h100, CURVE, nodes=2)
    assert seconds == pytest.approx((5 + 14 + 20 + 17) * 1e-6 + 1.125 / 0.7 * 1e9 / 360e9, rel=1e-6)


def test_an_all_reduce_crosses_trees_of_nodes(h100):
    """8 nodes: 3 levels up and 3 down, 10 us each. A gather passes 7 nodes one after the other."""
    small = all_reduce_seconds(8, 64, h100, CURVE, nodes=8)
    assert small == pytest.approx((5 + 14 + 6 * 10) * 1e-6, rel=1e-4)
    assert all_gather_seconds(8, 64, h100, CURVE, nodes=8) == pytest.approx((5 + 7 + 70) * 1e-6, rel=1e-4)


def test_the_slow_link_between_nodes_bounds_an_all_to_all(h100):
    # Half of the message leaves the node, at 40e9 x 0.87 bytes/s.
    seconds = all_to_all_seconds(1e9, 16, h100, CURVE, nodes=2)
    assert seconds == pytest.approx((5 + 4 + 20 + 5) * 1e-6 + 0.5e9 / (40e9 * 0.87), rel=1e-6)


def test_one_device_a_node_uses_the_link_between_them_only(h100):
    # 1 pass back and forth: 2 hops of 10 us, all bytes once.
    seconds = all_reduce_seconds(1e9, 2, h100, CURVE, nodes=2)
    assert seconds == pytest.approx((5 + 20 + 17) * 1e-6 + 1e9 / 40e9, rel=1e-6)


@pytest.mark.parametrize("price", PRICES)
def test_one_rank_and_no_bytes_cost_nothing(h100, price):
    assert price(1000, 1, h100, CURVE) == 0
    assert price(0, 4, h100, CURVE) == 0


@given(
    price=prices,
    preset=presets,
    kernels=kernels,
    num_ranks=ranks,
    many=st.lists(sizes, min_size=1, max_size=9),
)
def test_arrays_are_priced_as_numbers_are(devices, price, preset, kernels, num_ranks, many):
    def seconds(num_bytes):
        return price(num_bytes, num_ranks, devices[preset], CURVE, kernels=kernels)

    assert seconds(np.array(many)).tolist() == [seconds(size) for size in many]


@given(price=prices, preset=presets, kernels=kernels, num_ranks=ranks, size=sizes, more=sizes)
def test_more_bytes_are_never_faster(devices, price, preset, kernels, num_ranks, size, more):
    few, many = (price(n, num_ranks, devices[preset], CURVE, kernels=kernels) for n in (size, size + more))
    assert few <= many


@given(price=prices, preset=presets, kernels=kernels, num_ranks=ranks, size=sizes, gain=st.floats(1.0, 10.0))
def test_more_bandwidth_is_never_slower(devices, price, preset, kernels, num_ranks, size, gain):
    device = devices[preset]
    link = replace(device.link, bandwidth_bytes_per_s=gain * device.link.bandwidth_bytes_per_s)
    faster = replace(device, **{"pcie" if device.scale_up is None else "scale_up": link})
    slow, fast = (price(size, num_ranks, d, CURVE, kernels=kernels) for d in (device, faster))
    assert fast <= slow * (1 + 1e-12)


@given(preset=presets, kernels=kernels, num_ranks=ranks, size=sizes)
def test_an_all_reduce_never_beats_the_wire(devices, preset, kernels, num_ranks, size):
    """Every rank must receive what it lacks: at least (p - 1)/p of the message (Patarasuk, Yuan, 2009)."""
    device = devices[preset]
    wire_s = (num_ranks - 1) / num_ranks * size / device.link.bandwidth_bytes_per_s
    assert (
        all_reduce_seconds(size, num_ranks, device, CollectiveCurve(bandwidth_share=1.0), kernels=kernels)
        > wire_s
    )


def test_rejects_what_no_cluster_has(h100):
    with pytest.raises(ValueError, match=r"kernels=gloo: must be one of vllm, trtllm, nccl"):
        all_reduce_seconds(1, 2, h100, CURVE, kernels="gloo")
    with pytest.raises(ValueError, match=r"nodes=3: must divide num_ranks=8"):
        all_gather_seconds(1, 8, h100, CURVE, nodes=3)
    with pytest.raises(ValueError, match=r"nodes=1: 16 ranks need 2 nodes of 8 devices"):
        all_to_all_seconds(1, 16, h100, CURVE)
    with pytest.raises(ValueError, match=r"inter_node=None: H100 SXM has no link between nodes"):
        send_recv_seconds(1, 2, replace(h100, inter_node=None), CURVE, nodes=2)


def test_rejects_impossible_parameters():
    with pytest.raises(ValueError, match=r"bandwidth_share=1.2: must be a share"):
        CollectiveCurve(bandwidth_share=1.2)
    with pytest.raises(ValueError, match=r"hop_s=0.0: must be a finite number > 0"):
        CollectiveCurve(hop_s=0.0)
