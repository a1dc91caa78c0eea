from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.device import Device, Link
from hwmodels.model.weights import WEIGHT_FORMATS
from hwmodels.operators.gemm import (
    CUBLAS,
    CUBLAS_SM90,
    CUTLASS_8BIT_SM90,
    FP8_BLOCK_SM90,
    WEIGHT_ONLY,
    GemmCurve,
    GemmKernels,
    Tile,
    found_share,
    gemm_seconds,
    kernels_of,
    waves,
)

BF16 = WEIGHT_FORMATS["bf16"]
PCIE = Link(name="PCIe 5.0 x16", bandwidth_bytes_per_s=64e9, latency_s=2.5e-6)
H100 = Device(
    name="H100",
    source="data sheet",
    memory_bytes=80e9,
    memory_bandwidth_bytes_per_s=3.35e12,
    peak_flops_per_s={"fp32": 67e12, "tf32": 494.7e12, "fp16": 989.4e12, "bf16": 989.4e12, "fp8": 1978.9e12},
    num_sms=132,
    l2_bytes=50e6,
    tdp_w=700,
    idle_w=70,
    pcie=PCIE,
    price_usd_per_hour=2.7,
    price_source="assumed",
)
A100_TYPES = replace(H100, peak_flops_per_s={"fp16": 312e12, "bf16": 312e12, "int8": 624e12})

sizes = st.integers(1, 20_000)
formats = st.sampled_from(sorted(WEIGHT_FORMATS))
libraries = st.sampled_from(["vllm", "trtllm"])


def seconds(m, n, k, weights="bf16", device=H100, curve=None, **settings):
    return gemm_seconds(m, n, k, WEIGHT_FORMATS[weights], device, curve or GemmCurve(), **settings)


def test_formats_that_no_row_measured_are_quantised_by_a_kernel_of_their_own():
    device = replace(H100, peak_flops_per_s=H100.peak_flops_per_s | {"fp4": 4e15})
    chosen = kernels_of(WEIGHT_FORMATS["nvfp4"], device, GemmCurve(), "vllm")
    assert chosen == replace(CUBLAS_SM90, before_s=3.5e-6)
    fused, alone = (seconds(4096, 4096, 4096, "nvfp4", device, fused_input=fused) for fused in (True, False))
    assert alone - fused > 3.5e-6


def test_worked_example_of_the_docstring():
    stream = (7168 * 4096 * 2 + 16 * 7168 * 2) / (0.82 * 3.35e12) + 0.4e-6  # activations: in the L2
    tiles = 4096 * (64 + 64) * 2 / 150e9 + 16 * 64 * 2 / 40e9  # 112 tiles, below one wave
    expected = 2.4e-6 + (tiles**3 + stream**3) ** (1 / 3)
    assert seconds(16, 7168, 4096) == pytest.approx(expected)
    assert expected == pytest.approx(24.5e-6, rel=2e-3)


def test_large_products_approach_the_share_of_the_peak_where_operands_arrive_in_time():
    curve = GemmCurve(wave_share=0.0, l2_bytes_per_sm_s=1e15, store_bytes_per_sm_s=1e15)
    size = 32_768
    assert 2 * size**3 / seconds(size, size, size, curve=curve) == pytest.approx(989.4e12 * 0.84, rel=0.01)


def test_loading_operands_binds_where_the_l2_is_slow():
    """Best tile 128 x 256: 768 bytes a step for 65,536 FLOPs."""
    curve = GemmCurve(wave_share=0.0, l2_bytes_per_sm_s=10e9, store_bytes_per_sm_s=1e15)
    size = 32_768
    reached = 65_536 / 768 * 10e9 * 132
    assert 2 * size**3 / seconds(size, size, size, curve=curve) == pytest.approx(reached, rel=0.01)


@pytest.mark.parametrize(
    ("weights", "bytes_per_weight"),
    [("bf16", 2), ("fp8", 1), ("fp8_block", 1 + 4 / 16_384), ("int8_wo", 1), ("int4_wo", 0.5 + 2.5 / 128)],
)
def test_large_matrices_stream_at_the_bandwidth_share(weights, bytes_per_weight):
    one_column = seconds(1, 100_000, 65_536, weights, fused_input=True)
    streamed = 100_000 * 65_536 * bytes_per_weight / (0.82 * 3.35e12)
    assert one_column == pytest.approx(streamed, rel=0.10)
    assert one_column > streamed


def test_a_wave_more_costs_a_wave_where_kernels_do_not_spread_it():
    """132 tiles and one more: twice the time if the last wave counts in full, 133/132 if it is spread."""
    assert waves(np.array([1.0, 133 / 132]), 1.0).tolist() == [1.0, 2.0]
    assert waves(np.array([1.0, 133 / 132]), 0.0).tolist() == [1.0, 133 / 132]
    assert waves(np.array([0.1]), 0.3).tolist() == [1.0]


def test_libraries_split_k_where_there_are_few_tiles():
    """A single tile over a long k: 32 SMs share it, and adding up their parts costs 3.2 us."""
    whole, split = (
        gemm_seconds_of(replace(CUBLAS_SM90, splits=splits), m=64, n=64, k=65_536)
        for splits in ((1,), (1, 2, 4, 8, 16, 32))
    )
    assert whole == pytest.approx(2.4e-6 + 65_536 * 256 / 150e9, rel=0.01)
    assert 3.2e-6 + whole / 32 < split < whole / 10


def gemm_seconds_of(family, m, n, k):
    """Computes the seconds of a GEMM with another family of kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CUBLAS, "sm90", family)
        return seconds(m, n, k)


def test_a_tile_that_is_not_offered_for_this_m_is_not_taken():
    family = GemmKernels(tiles=(Tile(64, 64, max_m=64), Tile(128, 128, min_m=64)))
    k = 65_536
    short, tall = (gemm_seconds_of(family, m=m, n=64, k=k) - 2.4e-6 for m in (64, 65))
    assert short == pytest.approx(k * 256 / 150e9, rel=0.01)
    assert tall == pytest.approx(k * 2 * 128 * 128 / (989.4e12 * 0.84 / 132), rel=0.01)


def test_the_l2_holds_what_fits_and_nothing_of_twice_that():
    assert found_share(np.array([0.0, 10.0, 15.0, 20.0, 99.0]), 10.0).tolist() == [
        1,
        1,
        pytest.approx(1 / 3),
        0,
        0,
    ]


def test_only_repeated_calls_find_their_weights_in_the_l2():
    """4.2 MB of 50 MB."""
    cold, warm = seconds(1, 1024, 2048), seconds(1, 1024, 2048, repeated=True)
    assert warm < cold
    assert seconds(1, 8192, 8192, repeated=True) == seconds(1, 8192, 8192)


def test_no_rows_take_no_time_and_parts_of_columns_are_allowed():
    assert seconds(np.array([0, 1]), 4096, 4096)[0] == 0.0
    assert seconds(8, 4096 / 3, 4096) < seconds(8, 4096 / 2, 4096)


def test_quantising_activations_is_paid_once_unless_fused():
    """vLLM on sm90: 2.4 us, and 128 rows over 132 SMs, each 0.85 us and 12,288 bytes at 15e9 bytes/s."""
    paid = seconds(128, 4096, 4096, "fp8") - seconds(128, 4096, 4096, "fp8", fused_input=True)
    assert paid == pytest.approx(2.4e-6 + 128 / 132 * (0.85e-6 + 4096 * 3 / 15e9))
    assert seconds(128, 4096, 4096) == seconds(128, 4096, 4096, fused_input=True)


def test_a_type_that_the_chip_lacks_saves_bytes_but_no_arithmetic():
    """fp8 on an A100: the bytes of int8 weights that are unpacked; with many rows slower than bf16."""
    curve = GemmCurve(compute_capability="sm80")
    few, many = (
        {name: seconds(m, 8192, 8192, name, A100_TYPES, curve) for name in ("fp8", "int8_wo", "bf16")}
        for m in (1, 8192)
    )
    streamed = 8192 * 8192 / (0.82 * 3.35e12)
    assert few["fp8"] == few["int8_wo"] == pytest.approx(2.4e-6 + 0.4e-6 + streamed, rel=0.05)
    assert few["bf16"] > 2.4e-6 + 2 * streamed
    assert many["fp8"] == many["int8_wo"] == pytest.approx(many["bf16"] / 0.88, rel=0.02)


def test_every_library_and_format_finds_its_family():
    curve = GemmCurve()
    assert kernels_of(WEIGHT_FORMATS["fp8"], H100, curve, "vllm") is CUTLASS_8BIT_SM90
    assert kernels_of(WEIGHT_FORMATS["fp8_block"], H100, curve, "trtllm") is FP8_BLOCK_SM90
    assert kernels_of(WEIGHT_FORMATS["nvfp4"], H100, curve, "vllm") is WEIGHT_ONLY  # the chip has no fp4
    assert kernels_of(WEIGHT_FORMATS["mxfp4"], H100, curve, "trtllm") is WEIGHT_ONLY
    assert kernels_of(BF16, H100, curve, "trtllm") is CUBLAS_SM90


@given(m=sizes, n=sizes, k=sizes, more=sizes, weights=formats, kernels=libraries)
def test_more_of_anything_is_never_faster(m, n, k, more, weights, kernels):
    base = seconds(m, n, k, weights, kernels=kernels)
    # a library that picks its tile by m alone may pick a better one for one row more
    if kernels == "trtllm" or weights not in ("fp8", "int8"):
        assert seconds(m + more, n, k, weights, kernels=kernels) >= base * (1 - 1e-12)
    assert seconds(m, n + more, k, weights, kernels=kernels) >= base * (1 - 1e-12)
    assert seconds(m, n, k + more, weights, kernels=kernels) >= base * (1 - 1e-12)


@given(m=sizes, n=sizes, k=sizes, factor=st.floats(1.0, 4.0), weights=formats)
def test_a_faster_device_is_never_slower(m, n, k, factor, weights):
    base = seconds(m, n, k, weights)
    more_bandwidth = replace(H100, memory_bandwidth_bytes_per_s=factor * 3.35e12)
    more_flops = replace(H100, peak_flops_per_s={d: factor * f for d, f in H100.peak_flops_per_s.items()})
    for device in (more_bandwidth, more_flops, replace(H100, l2_bytes=factor * 50e6)):
        assert seconds(m, n, k, weights, device) <= base * (1 + 1e-12)


@given(m=st.lists(sizes, min_size=1, max_size=8), n=sizes, k=sizes, weights=formats)
def test_arrays_broadcast_to_what_single_calls_give(m, n, k, weights):
    together = seconds(np.array(m)[:, None], np.array([n, k]), k, weights)
    assert together.shape == (len(m), 2)
    single = [[float(seconds(i, j, k, weights)) for j in (n, k)] for i in m]
    # NumPy's powers of arrays and of numbers may differ in the last bit: `ByCount` always asks for arrays.
    np.testing.assert_allclose(together, single, rtol=1e-14)


def test_rejects_an_unknown_library():
    with pytest.raises(ValueError, match="kernels=sglang: must be one of vllm, trtllm"):
        seconds(1, 128, 128, kernels="sglang")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"compute_capability": "sm70"},
            "compute_capability=sm70: must be one of sm80, sm89, sm90, sm100, sm120",
        ),
        ({"flops_share_8bit": 1.2}, "flops_share_8bit=1.2: must be a share"),
        ({"bandwidth_share": 0.0}, "bandwidth_share=0.0"),
        ({"start_s": float("nan")}, "start_s=nan"),
    ],
)
def test_rejects_figures_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        GemmCurve(**settings)
