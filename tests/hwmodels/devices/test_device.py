"""Settings that a Device refuses."""

import math

import pytest

from hwmodels.device import Device, Link

PCIE = Link(name="PCIe 4.0 x16", bandwidth_bytes_per_s=32e9, latency_s=2.5e-6)
NVLINK = Link(name="NVLink 3", bandwidth_bytes_per_s=300e9, latency_s=0.8e-6)


def make_device(**given):
    settings = {
        "name": "A100",
        "memory_bytes": 80 * 2**30,
        "memory_bandwidth_bytes_per_s": 2e12,
        "peak_flops_per_s": {"bf16": 312e12},
        "num_sms": 108,
        "l2_bytes": 40 * 2**20,
        "tdp_w": 400,
        "idle_w": 55,
        "pcie": PCIE,
        "price_usd_per_hour": 1.5,
        "price_source": "test",
        "source": "test",
    }
    return Device(**{**settings, **given})


def test_devices_talk_over_pcie_where_there_is_no_better_link():
    assert make_device().link is PCIE
    assert make_device(scale_up=NVLINK).link is NVLINK


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sm_clock_hz": 0.0}, "sm_clock_hz=0.0: must be a finite number > 0 Hz"),
        ({"memory_bytes": 0}, "memory_bytes=0: must be a finite number > 0 bytes"),
        ({"memory_bytes": math.inf}, "memory_bytes=inf: must be a finite number > 0 bytes"),
        (
            {"memory_bandwidth_bytes_per_s": math.nan},
            "memory_bandwidth_bytes_per_s=nan: must be a finite number > 0 bytes/s",
        ),
        ({"tdp_w": math.inf}, "tdp_w=inf: must be a finite number > 0 W"),
        ({"l2_bytes": 0}, "l2_bytes=0: must be a finite number > 0 bytes"),
        ({"idle_w": math.nan}, "idle_w=nan: must be a finite number >= 0 W"),
        ({"idle_w": 400}, "idle_w=400: must be below tdp_w=400 W"),
        ({"num_sms": math.nan}, "num_sms=nan: must be a whole number >= 1"),
        ({"gpus_per_node": 0}, "gpus_per_node=0: must be >= 1"),
        ({"peak_flops_per_s": {"bf61": 1e12}}, "peak_flops_per_s.bf61: unknown dtype; known: fp32"),
        ({"peak_flops_per_s": {"bf16": -1.0}}, "peak_flops_per_s.bf16=-1.0: must be a finite number > 0"),
        ({"peak_flops_per_s": {"bf16": math.inf}}, "peak_flops_per_s.bf16=inf: must be a finite number > 0"),
        ({"price_usd_per_hour": -1.0}, "price_usd_per_hour=-1.0: must be a finite number >= 0"),
        ({"price_usd_per_hour": math.nan}, "price_usd_per_hour=nan: must be a finite number >= 0"),
    ],
)
def test_device_rejects_impossible_figures(given, message):
    with pytest.raises(ValueError, match=message):
        make_device(**given)


def test_device_rejects_a_dtype_it_does_not_compute_in():
    with pytest.raises(ValueError, match="dtype=fp32: A100 does not compute in it; it has bf16"):
        make_device().compute_dtype("fp32")


def test_without_a_link_between_nodes_a_device_rejects_more_ranks_than_a_node_has():
    make_device().check_reaches(8)
    with pytest.raises(
        ValueError,
        match=r"tensor_parallel_size=16: must be 1 to 8, the devices of one node, as A100 has no link",
    ):
        make_device().check_reaches(16)


def test_a_device_before_ampere_computes_bf16_checkpoints_in_fp16():
    turing = make_device(name="T4", peak_flops_per_s={"fp16": 65e12})
    assert turing.compute_dtype("bf16") == turing.compute_dtype("fp16") == "fp16"
    with pytest.raises(ValueError, match="dtype=fp32: T4 does not compute in it; it has fp16"):
        turing.compute_dtype("fp32")
