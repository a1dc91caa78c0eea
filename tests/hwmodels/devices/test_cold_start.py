"""Cold starts of replicas: each part by hand, and refused settings."""

import pytest
from omegaconf import OmegaConf

from experiments.app.settings.config_groups import CONFIG_DIR
from hwmodels.device import Link, Storage
from hwmodels.host import ColdStart, CudaGraphs, WeightSource
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.iterations.memory import weight_bytes
from sim.settings.build import build

PCIE = Link(name="PCIe", bandwidth_bytes_per_s=50e9, latency_s=0.0)


def parts(weights_bytes=24e9, storage=None, cuda_graphs=None, **settings):
    return ColdStart(**settings).parts(
        weights_bytes=weights_bytes,
        pcie=PCIE,
        storage=storage or Storage(disk_bytes_per_s=6e9, pcie_share=0.8),
        cuda_graphs=cuda_graphs or CudaGraphs(enabled=False),
    )


def test_the_worked_number(models, devices):
    start = ColdStart().parts(
        weights_bytes=weight_bytes(models["llama3_1_8b"], ParallelLayout()),
        pcie=devices["h100_sxm"].pcie,
        storage=Storage(),
        cuda_graphs=CudaGraphs(),
    )
    assert start.load_s == pytest.approx(10.7, abs=0.05)
    assert start.total_s == pytest.approx(300 + 10.7 + 57 + 51 * 0.8, abs=0.05)


@pytest.mark.parametrize(
    ("settings", "load_s"),
    [
        ({"source": WeightSource.disk}, 24 / 6),
        ({"source": WeightSource.network, "network_bytes_per_s": 2e9}, 24 / 2),
        ({"source": WeightSource.host_memory}, 24 / 40),  # 0.8 of 50e9 bytes/s
        ({"source": WeightSource.network, "network_bytes_per_s": 100e9}, 24 / 40),
        ({"source": WeightSource.disk, "loader_bytes_per_s": 1.5e9}, 24 / 1.5),
        ({"source": WeightSource.network, "network_bytes_per_s": 1e9, "loader_bytes_per_s": 1.5e9}, 24),
    ],
)
def test_the_slowest_of_source_pcie_and_loader_counts(settings, load_s):
    assert parts(**{"loader_bytes_per_s": None, **settings}).load_s == pytest.approx(load_s)


def test_devices_load_their_shares_at_the_same_time(models, devices):
    """Two devices load half of the weights each in half the time, except for what each holds in full."""
    model = models["llama3_1_8b"]
    one, two = (weight_bytes(model, ParallelLayout(tensor_parallel_size=size)) for size in (1, 2))
    assert parts(two).load_s / parts(one).load_s == pytest.approx(two / one)
    assert two / one == pytest.approx(0.5, rel=0.05)


def test_graphs_are_captured_one_by_one_and_none_without_them():
    assert parts(capture_s=0.5, cuda_graphs=CudaGraphs(max_capture_size=16)).capture_s == 2.5  # 1 2 4 8 16
    assert parts(capture_s=0.5, cuda_graphs=CudaGraphs(enabled=False)).capture_s == 0


def test_a_machine_that_waits_needs_no_provisioning():
    start = parts(provision_s=0, warm_up_s=3, loader_bytes_per_s=None)
    assert start == (0, 4, 3, 0)
    assert start.total_s == 7


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"provision_s": -1}, "provision_s=-1: must be a finite number >= 0 s"),
        ({"warm_up_s": float("inf")}, "warm_up_s=inf: must be a finite number >= 0 s"),
        ({"capture_s": float("nan")}, "capture_s=nan: must be a finite number >= 0 s"),
        ({"network_bytes_per_s": 0}, "network_bytes_per_s=0: must be a finite number > 0 bytes/s"),
        (
            {"loader_bytes_per_s": 0},
            "loader_bytes_per_s=0: must be a finite number > 0 bytes/s, or null for no limit",
        ),
    ],
)
def test_rejects_times_and_rates_that_make_no_sense(settings, message):
    with pytest.raises(ValueError, match=message):
        ColdStart(**settings)


def test_the_shipped_ones_build_and_are_ordered(models, devices):
    totals_s = {}
    for file in sorted((CONFIG_DIR / "cold_start").glob("*.yaml")):
        start = build(OmegaConf.load(file), "cold_start").parts(
            weights_bytes=weight_bytes(models["llama3_1_8b"], ParallelLayout()),
            pcie=devices["h100_sxm"].pcie,
            storage=Storage(),
            cuda_graphs=CudaGraphs(),
        )
        totals_s[file.stem] = start.total_s
    assert sorted(totals_s, key=totals_s.__getitem__) == ["in_memory", "ready_node", "new_node"]
    assert totals_s["in_memory"] < 5
