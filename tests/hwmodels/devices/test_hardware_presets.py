"""Every shipped device builds, names the sources of its figures, and has them right."""

import csv
import re
from pathlib import Path

import pytest

from hwmodels.assembly.site import Kernels
from hwmodels.host import CudaGraphs, HostOverhead
from hwmodels.iterations.layout import ParallelLayout
from hwmodels.levels import Calibrated, Replica
from hwmodels.operators import Calibration

PROJECT = Path(__file__).resolve().parents[3]
PRESETS = sorted((PROJECT / "configs" / "hardware").glob("*.yaml"))
GPU_FIGURES = PROJECT.parent / "shared" / "data" / "ops" / "gpus.csv"

DENSE_BF16 = {
    "a100_40gb_sxm": 312e12,
    "a100_80gb_sxm": 312e12,
    "a100_pcie": 312e12,
    "a10g": 70e12,
    "a30": 165e12,
    "a40": 149.7e12,
    "a800_sxm": 312e12,
    "ascend_910b": 353.9e12,
    "b200_sxm": 2250e12,
    "b300_sxm": 2250e12,
    "b60": 98.3e12,
    "cerebras_wse3_4": 63.4e15,
    "gaudi2": 432e12,
    "gaudi3": 1835e12,
    "gb10": 125e12,
    "gb200": 2500e12,
    "gb300": 2500e12,
    "gh200": 989.4e12,
    "gh200_144gb": 989.4e12,
    "groq_lpu_576": None,
    "h100_nvl": 835.5e12,
    "h100_pcie": 756.5e12,
    "h100_sxm": 989.4e12,
    "h20": 148e12,
    "h200_sxm": 989.4e12,
    "h20_141gb": 148e12,
    "h800_pcie": 756.5e12,
    "h800_sxm": 989.4e12,
    "inferentia2": 190e12,
    "jetson_agx_orin": 42.5e12,
    "l20": 119.5e12,
    "l4": 121e12,
    "l40s": 362.05e12,
    "m2_ultra": 27.2e12,
    "m3_max": 14.1e12,
    "m4_max": 18.4e12,
    "mi250x": 191.5e12,
    "mi300x": 1307.4e12,
    "mi308x": 344e12,
    "mi325x": 1307.4e12,
    "mi355x": 2516.6e12,
    "rtx_3090": 71e12,
    "rtx_4090": 165.2e12,
    "rtx_5090": 209.5e12,
    "rtx_6000_ada": 364.2e12,
    "rtx_a6000": 154.8e12,
    "rtx_pro_6000_server": 467.8e12,
    "t4": None,
    "tpu_v3": 123e12,
    "tpu_v4": 275e12,
    "tpu_v5e": 197e12,
    "tpu_v5p": 459e12,
    "tpu_v6e": 918e12,
    "tpu_v7": 2307e12,
    "trainium1": 190e12,
    "trainium2": 667e12,
    "v100_sxm": None,
    "xeon_8480": 229e12,
}
# The source's figure, and why ours differs: each was looked up.
KNOWN_DIFFERENCES = {
    ("rtx_pro_6000_server", "mem_bw_tb_s"): "1.792 is the Workstation Edition",
    ("l4", "mem_gib"): "24 is without ECC",
    ("b200_sxm", "inter_node_gb_s"): "100 needs ConnectX-8; DGX B200 has 400 Gb/s per GPU",
    ("b60", "fp8_tflops"): "no fp8 units; the source repeats its fp16 figure",
    ("b60", "intra_node_gb_s"): "28.4 is measured, ours is the data sheet's",
}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_names_its_source(path):
    assert re.search(r"^source: \S", path.read_text(), re.MULTILINE)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_idle_power_says_where_it_comes_from(path):
    assert re.search(r"^idle_w: \d+  # (.*published|assumed)", path.read_text(), re.MULTILINE)


def test_every_device_names_the_source_of_its_price(devices):
    assert all(re.search(r"20\d\d", device.price_source) for device in devices.values())


def test_bf16_peaks_are_dense(devices):
    assert {name: device.peak_flops_per_s.get("bf16") for name, device in devices.items()} == DENSE_BF16


def test_tensor_cores_are_sparse_from_ampere_on(devices):
    without = {"b60", "mi250x", "t4", "v100_sxm", "m2_ultra", "m3_max", "m4_max", "xeon_8480"}
    without |= {"groq_lpu_576", "cerebras_wse3_4", "ascend_910b"}
    gpus = {name: device for name, device in devices.items() if device.systolic is None}
    assert {name for name, device in gpus.items() if not device.sparse_tensor_cores} == without


def test_peaks_of_systolic_devices_are_whole_arrays_at_a_plausible_clock(devices):
    """Peak / (2 rows columns) is arrays x clock: the counts of the documents imply clocks of 0.9 to 3 GHz."""
    arrays = {
        "tpu_v3": 4,
        "tpu_v4": 8,
        "tpu_v5e": 4,
        "tpu_v5p": 8,
        "tpu_v6e": 4,
        "trainium1": 2,
        "trainium2": 8,
        "inferentia2": 2,
        "gaudi2": 2,
        "gaudi3": 8,
    }
    for name, count in arrays.items():
        array, peak = devices[name].systolic, devices[name].peak_flops_per_s["bf16"]
        assert 0.9e9 < peak / (2 * array.rows * array.columns * count) < 3e9, name


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_devices_with_no_measured_relative_say_so(path, devices, models):
    uncalibrated = "override /calibration@_global_.calibration: none" in path.read_text()
    assert uncalibrated or devices[path.stem].systolic is None
    if uncalibrated:
        replica = Replica(
            model=models["llama3_1_8b"],
            device=devices[path.stem],
            layout=ParallelLayout(),
            calibration=Calibration(),
            host=HostOverhead(),
            cuda_graphs=CudaGraphs(),
            kernels=Kernels(),
        )
        assert f"{devices[path.stem].name} was never measured" in Calibrated().basis(replica)


@pytest.mark.parametrize("name", ["t4", "v100_sxm"])
def test_a_bf16_checkpoint_runs_in_fp16_before_ampere(devices, name):
    assert devices[name].compute_dtype("bf16") == "fp16"
    assert devices["a100_80gb_sxm"].compute_dtype("bf16") == "bf16"


def test_multiprocessors_are_those_that_cuda_reports(devices):
    # The performance database's own column is partly wrong (H100: 90, H200: 90, B200: 100).
    sms = {
        "a100_80gb_sxm": 108,
        "h100_sxm": 132,
        "h200_sxm": 132,
        "b200_sxm": 148,
        "rtx_pro_6000_server": 188,
    }
    assert {name: devices[name].num_sms for name in sms} == sms


@pytest.mark.skipif(not GPU_FIGURES.exists(), reason="needs ../shared/data/ops/gpus.csv")
def test_figures_agree_with_the_performance_database(devices):
    """Memory, bandwidth, peaks, power and links of every GPU there, within 1 %, except where explained."""
    differing = set()
    with GPU_FIGURES.open() as file:
        for row in csv.DictReader(file):
            name = {"a100_sxm": "a100_80gb_sxm"}.get(row["gpu"], row["gpu"])
            for column, ours in database_figures(devices[name]).items():
                if row[column] and ours != pytest.approx(float(row[column]), rel=0.01):
                    differing.add((name, column))
    assert differing == KNOWN_DIFFERENCES.keys()


def database_figures(device):
    peaks = device.peak_flops_per_s
    figures = {
        "mem_bw_tb_s": device.memory_bandwidth_bytes_per_s / 1e12,
        "mem_gib": device.memory_bytes / 2**30,
        "bf16_tflops": peaks["bf16"] / 1e12,
        "int8_tops": peaks["int8"] / 1e12,
        "fp8_tflops": peaks.get("fp8", 0.0) / 1e12,
        "fp4_tflops": peaks.get("fp4", 0.0) / 1e12,
        "watts": device.tdp_w,
        "gpus_per_node": device.gpus_per_node,
        "intra_node_gb_s": device.link.bandwidth_bytes_per_s / 1e9,
    }
    if device.inter_node is not None:
        figures["inter_node_gb_s"] = device.inter_node.bandwidth_bytes_per_s / 1e9
    return figures
