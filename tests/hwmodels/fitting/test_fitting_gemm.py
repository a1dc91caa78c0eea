from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.study.errors import errors
from hwmodels.fitting.gemm import GROUP_BY, capability_of, fit_gemm, modelled_rows, predict_gemm
from hwmodels.fitting.robust import validation_rows
from hwmodels.model.weights import WEIGHT_FORMATS
from hwmodels.operators.gemm import GemmCurve, gemm_seconds

pytestmark = pytest.mark.xdist_group("gemm")  # its tests share a fit of all rows

GEMM = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "ops" / "gemm.parquet"

PRESETS = {
    "a100_sxm": "a100_80gb_sxm",
    "h100_sxm": "h100_sxm",
    "h200_sxm": "h200_sxm",
    "b200_sxm": "b200_sxm",
    "rtx_pro_6000_server": "rtx_pro_6000_server",
}

TYPES = {
    "bf16": ("bfloat16",),
    "fp8": ("fp8", "fp8_block"),
    "4-bit": ("int4_wo", "nvfp4"),
}

RELATIVES = {
    "a100_sxm": "h100_sxm",
    "h100_sxm": "h200_sxm",
    "h200_sxm": "h100_sxm",
    "b200_sxm": "h100_sxm",
    "rtx_pro_6000_server": "h100_sxm",
}
"""Whose curve a device gets that was not measured."""


def make_rows(m, n, k, **columns):
    defaults = {"framework": "vllm", "kernel": "cublas", "dtype": "bfloat16", "latency_us": 10.0}
    sizes = np.broadcast_arrays(*(np.asarray(size, dtype=float) for size in (m, n, k)))
    merged = {**dict(zip("mnk", (size.ravel() for size in sizes), strict=True)), **defaults, **columns}
    return {name: np.broadcast_to(np.asarray(values), sizes[0].size) for name, values in merged.items()}


def test_rows_are_priced_by_their_own_library_and_type(devices):
    rows = make_rows(
        [16, 16, 4096],
        4096,
        4096,
        framework=["vllm", "trtllm", "vllm"],
        dtype=["bfloat16", "fp8", "sq"],
    )
    device, curve = devices["h100_sxm"], GemmCurve()
    expected = [
        gemm_seconds(m, 4096, 4096, WEIGHT_FORMATS[w], device, curve, kernels=kernels, repeated=True)
        for m, w, kernels in ((16, "bf16", "vllm"), (16, "fp8", "trtllm"), (4096, "int8", "vllm"))
    ]
    assert predict_gemm(rows, device, curve).tolist() == [float(seconds) for seconds in expected]


def test_a_figure_that_no_row_decides_keeps_its_default(devices):
    rows = make_rows([1, 64, 1024, 8192] * 4, 4096, 4096, dtype="fp8", latency_us=50.0)
    found = fit_gemm(rows, devices["h100_sxm"], compute_capability="sm90").curve
    assert found.flops_share_4bit == GemmCurve().flops_share_4bit
    assert found.start_s == GemmCurve().start_s


def test_rows_that_time_the_host_are_not_modelled():
    kernels = ["DeepGemmFp8BlockScaledMMKernel", "torch_flow", "CutlassFP8ScaledMMLinearKernel"]
    assert modelled_rows({"kernel": kernels}).tolist() == [False, True, True]


def test_the_kind_of_chip_is_read_off_the_kernels():
    assert capability_of(["torch_flow"]) == "sm80"
    assert capability_of(["torch_flow", "FlashInferCuteDslNvFp4LinearKernel"]) == "sm100"
    with pytest.raises(ValueError, match="kernel: rows name kernels of sm100, sm90; give rows of one device"):
        capability_of(["FlashInferFp8BlockScaledMMKernel", "FlashInferCuteDslNvFp4LinearKernel"])


@pytest.fixture(scope="module")
def measured():
    if not GEMM.exists():
        pytest.skip("needs shared/data/ops/gemm.parquet beside the checkout")
    return pd.read_parquet(GEMM)


@pytest.fixture(scope="module")
def curves(measured, devices):
    """Fits the curves to one row in six of those that are not kept back: quicker, nearly the same curves."""
    fitted = measured[~validation_rows(measured, GROUP_BY)]
    return {
        gpu: fit_gemm(columns(fitted[fitted.gpu == gpu].iloc[::6]), devices[preset]).curve
        for gpu, preset in PRESETS.items()
    }


def columns(frame):
    return {name: frame[name].to_numpy() for name in frame.columns}


def pooled_errors(frames, devices, curve_of):
    """Computes the errors over the rows of all GPUs."""
    predicted, latencies = [], []
    for gpu, frame in frames.groupby("gpu"):
        predicted.append(predict_gemm(columns(frame), devices[PRESETS[gpu]], curve_of(gpu)))
        latencies.append(frame.latency_us.to_numpy() * 1e-6)
    return errors(np.concatenate(predicted), np.concatenate(latencies))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "median", "p90"),
    [("bf16", 6, 20), ("fp8", 12, 35), ("4-bit", 15, 40)],
    ids=lambda value: str(value),
)
def test_matrices_that_were_not_fitted_are_within_the_goal(measured, devices, curves, name, median, p90):
    kept_back = measured[validation_rows(measured, GROUP_BY) & modelled_rows(measured)]
    found = pooled_errors(kept_back[kept_back.dtype.isin(TYPES[name])], devices, curves.__getitem__)
    assert found.rows > 5000
    assert found.median <= median
    assert found.p90 <= p90


def test_a_gpu_that_was_not_measured_is_within_the_goal(measured, devices, curves):
    """It uses the curve of its relative, and the kernels of its own kind of chip."""

    def relative(gpu):
        return replace(curves[RELATIVES[gpu]], compute_capability=curves[gpu].compute_capability)

    found = pooled_errors(measured[modelled_rows(measured)], devices, relative)
    assert found.median <= 15
    assert found.p90 <= 40
