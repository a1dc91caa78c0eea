"""Ada cards, which no calibration was fitted to: their kernels, and layers that were timed on an RTX 4090."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.calibrate.relatives import composed
from hwmodels.device import Device
from hwmodels.model.weights import WEIGHT_FORMATS
from hwmodels.operators import Calibration
from hwmodels.operators.attention import DecodeAttention, HeadLayout, PrefillAttention
from hwmodels.operators.gemm import gemm_seconds, kernels_of

LAYERS = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "vllm_requests"
HEADS = HeadLayout(num_heads=32, num_kv_heads=8, head_dim=128)
MATRICES = {  # outputs, inputs of Llama-3.1-8B
    "qkv_proj": (6144, 4096),
    "o_proj": (4096, 4096),
    "gate_up_proj": (28672, 4096),
    "down_proj": (4096, 14336),
}
needs_layers = pytest.mark.skipif(not LAYERS.exists(), reason="needs the timed layers beside the project")


@pytest.fixture(scope="module")
def rtx_4090() -> tuple[Device, Calibration]:
    return composed("rtx_4090")


def layers(name: str) -> pd.DataFrame:
    rows = pd.read_parquet(LAYERS / f"layers_{name}.parquet")
    return rows[rows["gpu"] == "RTX4090"]


def median_and_p90(predicted_s: np.ndarray, measured_us: pd.Series) -> tuple[float, float]:
    """Returns the median and the 90th percentile of the absolute percentage errors."""
    errors = np.abs(100 * (predicted_s / (1e-6 * measured_us.to_numpy()) - 1))
    return tuple(np.percentile(errors, [50, 90]))


@needs_layers
def test_layers_of_an_rtx_4090_are_priced_without_a_fit_to_them(rtx_4090):
    """Priced as consumer Blackwell: 10 / 15 (GEMM), 8 / 19 (decode) and 21 / 56 % (prefill)."""
    device, calibration = rtx_4090
    dense, attention = layers("dense"), layers("attention")
    dense = dense[dense["layer"].isin(MATRICES)]
    n, k = np.array([MATRICES[layer] for layer in dense["layer"]], dtype=float).T
    bf16 = WEIGHT_FORMATS["bf16"]
    seconds = gemm_seconds(dense["tokens"].to_numpy(), n, k, bf16, device, calibration.gemm)
    median, p90 = median_and_p90(seconds, dense["time_us"])
    assert median < 4
    assert p90 < 12

    rows = attention[attention["prefill_chunk"] == 0]
    num_seqs = rows["n_decode"].to_numpy(dtype=float)
    decode = DecodeAttention(HEADS, device, calibration.attention)
    seconds = decode.seconds(num_seqs, num_seqs * rows["kv_decode"].to_numpy())
    median, p90 = median_and_p90(seconds, rows["time_us"])
    assert median < 10
    assert p90 < 25

    rows = attention[(attention["prefill_chunk"] > 0) & (attention["n_decode"] == 0)]
    new, cached = rows["prefill_chunk"].to_numpy(dtype=float), rows["kv_prefill"].to_numpy(dtype=float)
    prefill = PrefillAttention(HEADS, device, calibration.attention)
    seconds = prefill.seconds(np.ones_like(new), new, new * (cached + (new + 1) / 2), new + cached)
    median, p90 = median_and_p90(seconds, rows["time_us"])
    assert median < 13
    assert p90 < 36


@pytest.mark.parametrize("name", ["l4", "l40s", "rtx_4090"])
def test_ada_cards_run_their_own_kernels(name):
    device, calibration = composed(name)
    curves = (calibration.gemm, calibration.attention, calibration.mla, calibration.moe)
    assert {curve.compute_capability for curve in curves} == {"sm89"}
    # Triton has one tile for every m; neither card computes in fp4, so that weights are unpacked.
    block = kernels_of(WEIGHT_FORMATS["fp8_block"], device, calibration.gemm, "vllm")
    assert [(tile.rows, tile.columns) for tile in block.tiles] == [(64, 128)]
    nvfp4, int4 = (
        kernels_of(WEIGHT_FORMATS[f], device, calibration.gemm, "vllm") for f in ("nvfp4", "int4_wo")
    )
    assert nvfp4 == int4


def test_block_scaled_fp8_is_slower_than_row_scaled_fp8_on_ada():
    """Tuned kernels of CUTLASS against Triton's, at a size where arithmetic counts."""
    device, calibration = composed("l40s")
    block, row = (
        gemm_seconds(4096, 4096, 4096, WEIGHT_FORMATS[f], device, calibration.gemm)
        for f in ("fp8_block", "fp8")
    )
    assert block > 1.2 * row


def test_power_limits_bound_the_arithmetic_of_an_l4():
    """cuBLAS in torch-performance-test-data issue 120: 71 TFLOP/s at 2,048, 55 to 59 when sustained."""
    device, calibration = composed("l4")
    seconds = gemm_seconds(2048, 2048, 2048, WEIGHT_FORMATS["bf16"], device, calibration.gemm)
    assert 2 * 2048**3 / seconds == pytest.approx(71e12, rel=0.15)
    busy = calibration.under_load(device)
    seconds = gemm_seconds(8192, 8192, 8192, WEIGHT_FORMATS["bf16"], busy, calibration.gemm)
    assert 2 * 8192**3 / seconds == pytest.approx(57e12, rel=0.1)
