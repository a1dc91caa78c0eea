"""The links between two replicas, and their bandwidths."""

from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from sim.transfer.network import NetworkSettings, Topology

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def device(name):
    node = OmegaConf.load(CONFIGS / f"hardware/{name}.yaml")
    node.pop("defaults", None)
    return instantiate(node, _convert_="all")


@pytest.fixture(scope="module")
def h100():
    return device("h100_sxm")


@pytest.fixture(scope="module")
def l4():
    return device("l4")


def placed(settings, *sites):
    topology = Topology(settings)
    for index, (of_device, num_devices) in enumerate(sites):
        topology.place(index, of_device, num_devices)
    return topology


def described(route):
    return [(capacity.name, capacity.bytes_per_s) for capacity in route.capacities], route.latency_s


def test_auto_takes_nvlink_within_a_node_and_infiniband_beyond(h100):
    """Replicas of 4, 2 and 4 GPUs: the third does not fit on the first node of 8."""
    topology = placed(NetworkSettings(), (h100, 4), (h100, 2), (h100, 4))
    assert described(topology.route(0, 1)) == (
        [("replica 0 out, nvlink", 4 * 450e9 * 0.8), ("replica 1 in, nvlink", 2 * 450e9 * 0.8)],
        0.8e-6,
    )
    assert described(topology.route(1, 2)) == (
        [("replica 1 out, infiniband", 2 * 50e9 * 0.8), ("replica 2 in, infiniband", 4 * 50e9 * 0.8)],
        10e-6,
    )


def test_without_nvlink_a_node_has_pcie(l4):
    topology = placed(NetworkSettings(reached_share=1.0), (l4, 1), (l4, 1))
    assert described(topology.route(1, 0))[0] == [("replica 1 out, pcie", 32e9), ("replica 0 in, pcie", 32e9)]


def test_other_hardware_stands_on_other_nodes(h100, l4):
    topology = placed(NetworkSettings(), (h100, 1), (l4, 1))
    assert described(topology.route(0, 1))[0] == [
        ("replica 0 out, infiniband", 40e9),
        ("replica 1 in, infiniband", 20e9),
    ]


def test_a_replica_of_two_nodes_shares_none_with_anybody(h100):
    topology = placed(NetworkSettings(), (h100, 16), (h100, 16), (h100, 8))
    assert topology.route(0, 1).capacities[0].name == "replica 0 out, infiniband"
    assert topology.route(1, 2).capacities[0].name == "replica 1 out, infiniband"


def test_replicas_of_a_node_share_its_ethernet_port(h100):
    settings = NetworkSettings(kind="ethernet", bandwidth_bytes_per_s=1e9, latency_s=1e-4, reached_share=0.5)
    topology = placed(settings, *[(h100, 4)] * 4)
    names, latency_s = described(topology.route(0, 2))
    assert names == [
        ("replica 0 out, PCIe 5.0 x16", 4 * 32e9),
        ("node 0 out, ethernet", 0.5e9),
        ("node 1 in, ethernet", 0.5e9),
        ("replica 2 in, PCIe 5.0 x16", 4 * 32e9),
    ]
    assert latency_s == 1e-4
    assert topology.route(1, 3).capacities[1:3] == topology.route(0, 2).capacities[1:3]


def test_a_fabric_is_passed_by_all_that_leaves_a_node(h100):
    topology = placed(NetworkSettings(fabric_bytes_per_s=7e9), *[(h100, 4)] * 3)
    assert described(topology.route(0, 2))[0][1] == ("fabric", 7e9)
    assert topology.route(0, 2).bytes_per_s == 7e9
    assert len(topology.route(0, 1).capacities) == 2


def test_bounds_are_those_of_a_replica_and_direction(h100):
    topology = placed(NetworkSettings(max_transfers=3, buffer_gib=2), *[(h100, 4)] * 3)
    for capacity in topology.route(0, 2).capacities:
        assert (capacity.max_flows, capacity.max_bytes) == (3, 2 * 2**30)


def test_figures_of_ones_own_replace_the_data_sheet(h100):
    settings = NetworkSettings(kind="infiniband", bandwidth_bytes_per_s=100e9, latency_s=0, reached_share=1)
    topology = placed(settings, (h100, 2), (h100, 1))
    assert described(topology.route(0, 1)) == (
        [("replica 0 out, infiniband", 200e9), ("replica 1 in, infiniband", 100e9)],
        0,
    )


def test_refuses_a_link_that_the_device_does_not_have(l4):
    with pytest.raises(
        ValueError, match=r"network\.kind=nvlink: L4 has no such link; set network\.bandwidth"
    ):
        placed(NetworkSettings(kind="nvlink"), (l4, 1))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "token_ring"}, "kind=token_ring: must be one of auto, nvlink, pcie, infiniband, ethernet"),
        ({"kind": "nvlink", "bandwidth_bytes_per_s": 0.0}, "bandwidth_bytes_per_s=0.0: must be a finite"),
        ({"fabric_bytes_per_s": 0.0}, "fabric_bytes_per_s=0.0: must be a finite number > 0 bytes/s"),
        ({"kind": "pcie", "latency_s": -1.0}, "latency_s=-1.0: must be a finite number >= 0 s"),
        ({"reached_share": 0.0}, "reached_share=0.0: must be a share, > 0 and <= 1"),
        ({"max_transfers": 0}, "max_transfers=0: must be >= 1, or null for no limit"),
        ({"buffer_gib": 0.0}, "buffer_gib=0.0: must be a finite number > 0 GiB"),
        ({"bandwidth_bytes_per_s": 1e9}, "kind=auto: bandwidth_bytes_per_s and latency_s must be null"),
        ({"kind": "ethernet"}, "kind=ethernet: bandwidth_bytes_per_s and latency_s must be set"),
    ],
)
def test_refuses_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        NetworkSettings(**settings)


@pytest.mark.parametrize("path", sorted((CONFIGS / "network").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_joins_two_h100(h100, path):
    topology = placed(instantiate(OmegaConf.load(path)), (h100, 8), (h100, 8))
    assert 1e9 < topology.route(0, 1).bytes_per_s < 1e13


def test_a_replica_that_is_gone_leaves_no_port_and_its_devices_to_the_next_like_it(h100, l4):
    settings = NetworkSettings(kind="ethernet", bandwidth_bytes_per_s=1e9, latency_s=0.0)
    topology = placed(settings, *[(h100, 4)] * 4, (l4, 1))
    routes = [topology.route(0, 2), topology.route(2, 1), topology.route(3, 1)]
    assert [capacity.name for capacity, _ in topology.remove(2)] == [
        "replica 2 in, PCIe 5.0 x16",
        "replica 2 out, PCIe 5.0 x16",
    ]
    assert not topology.ports(2)
    assert [topology.has_route(*ends) for ends in ((0, 2), (2, 1), (3, 1))] == [False, False, True]
    assert not any("replica 2" in name for name in topology.capacities)
    topology.place(5, l4, 1)  # beside the other one
    topology.place(6, h100, 4)
    topology.place(7, h100, 4)
    assert topology.route(0, 6).capacities[1:3] == routes[0].capacities[1:3]  # node 1, as replica 2
    assert topology.route(0, 7).capacities[2].name == "node 3 in, ethernet"


def test_devices_that_have_changed_hands_are_not_free(h100):
    topology = placed(NetworkSettings(), (h100, 4), (h100, 4))
    topology.place(2, h100, 4, instead_of=1)
    topology.remove(1)
    topology.place(3, h100, 4)
    assert topology.route(0, 2).capacities[0].name == "replica 0 out, nvlink"
    assert topology.route(0, 3).capacities[0].name == "replica 0 out, infiniband"


def test_a_hosts_memory_is_read_and_written_through_a_port_of_its_own(h100):
    topology = Topology(NetworkSettings(kind="infiniband", reached_share=1.0))
    for index in range(2):
        topology.place(index, h100, 1, host_bytes_per_s=3e9)
    assert described(topology.route(0, 1, host=1))[0] == [
        ("replica 0 out, infiniband", 50e9),
        ("replica 1 in, infiniband", 50e9),
        ("replica 1 host in", 3e9),
    ]
    assert described(topology.route(1, 0, host=1))[0][-1] == ("replica 1 host out", 3e9)
    assert len(topology.route(0, 1).capacities) == 2
