"""The fit of MLA: known parameters come back, and head counts that were kept back are predicted."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.study.errors import errors
from hwmodels.fitting.mla import GROUP_BY, Attention, fit_mla, predict_mla, projections
from hwmodels.fitting.robust import validation_rows
from hwmodels.model.weights import weight_format
from hwmodels.operators.gemm import GemmCurve, StreamCurve, gemm_seconds, stream_seconds
from hwmodels.operators.mla import MlaCurve, MlaDecode, MlaHeads

MEASURED = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "ops" / "mla.parquet"
DEVICES = {
    "a100_sxm": ("a100_80gb_sxm", "sm80"),
    "h100_sxm": ("h100_sxm", "sm90"),
    "h200_sxm": ("h200_sxm", "sm90"),
    "b200_sxm": ("b200_sxm", "sm100"),
    "rtx_pro_6000_server": ("rtx_pro_6000_server", "sm120"),
}
"""Of each GPU in the table: the preset and the compute capability."""


def make_rows(shapes, **common):
    """Returns one row for each (num_heads, batch_size, seq_len, kv_len)."""
    common = {
        "framework": "trtllm",
        "version": "1.3",
        "scope": "kernel",
        "phase": "decode",
        "mla_dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "gemm_type": "bfloat16",
        "latency_us": np.nan,
        **common,
    }
    names = ("num_heads", "batch_size", "seq_len", "kv_len")
    rows = dict(zip(names, map(np.array, zip(*shapes, strict=True)), strict=True))
    return rows | {name: np.full(len(shapes), value) for name, value in common.items()}


def test_modules_of_other_blackwell_servers_have_chains_of_small_kernels(devices):
    """Small modules of vLLM take 30 us on B200, which were compiled, and 70 to 100 us on every other chip."""
    rows = make_rows([(8, 1, 1, 1024)], scope="module", framework="vllm", version="0.24.0")
    compiled, chained = (
        predict_mla(rows, devices[name], MlaCurve(compute_capability="sm100"))
        for name in ("b200_sxm", "b300_sxm")
    )
    assert 1.5 * compiled < chained < 3 * compiled
    ours = rows | {"framework": np.array(["trtllm"])}
    small, same = (
        predict_mla(ours, devices[name], MlaCurve(compute_capability="sm100"))
        for name in ("b200_sxm", "b300_sxm")
    )
    assert small == pytest.approx(same, rel=0.02)


def test_projections_hold_the_weights_of_a_deepseek_v3_layer():
    """187.1 million weights: 7168 x 2112 + 1536 x 24,576 + 512 x 32,768 + 16,384 x 7168, absorbed or not."""
    for absorbed in (True, False):
        shapes = projections(MlaHeads(num_heads=128), weight_format("fp8_block"), absorbed=absorbed)
        assert sum(n * k for n, k, _ in shapes) == 187_105_280


def test_absorbed_projections_stay_in_bf16():
    shapes = projections(MlaHeads(num_heads=16), weight_format("fp8_block"), absorbed=True)
    assert [stored.name for _, _, stored in shapes] == ["fp8_block"] * 3 + ["bf16"] * 2


def test_a_module_is_projections_attention_and_elementwise(devices):
    device, weights = devices["h200_sxm"], weight_format("bf16")
    (seconds,) = predict_mla(make_rows([(8, 32, 1, 1000)], scope="module"), device, MlaCurve())
    heads = MlaHeads(num_heads=8)
    gemms = sum(
        gemm_seconds(32.0, n, k, weights, device, GemmCurve(), kernels="trtllm")
        for n, k in ((2112, 7168), (1536, 1536), (7168, 1024), (4096, 128), (1024, 512))
    )
    attention = MlaDecode(heads, device, MlaCurve(), "trtllm").seconds(32, 32_000)
    norms = stream_seconds(2 * 2 * 2112 * 32, device, StreamCurve())
    assert seconds == pytest.approx(gemms + attention + norms, rel=1e-9)


def test_no_row_outside_graphs_is_faster_than_its_host(devices):
    rows = make_rows([(16, 1, 1, 16), (16, 256, 1, 32768)], framework="vllm", version="0.14.0")
    short, long = predict_mla(rows, devices["a100_80gb_sxm"], MlaCurve(compute_capability="sm80"))
    assert short == 330e-6
    assert long > 330e-6


def test_old_rows_are_predicted_with_the_curve_of_another_chip(devices):
    """Hopper's kernels, which have no old version; the host is waited for all the same."""
    rows = make_rows([(16, 1, 1, 16)], framework="vllm", version="0.14.0")
    assert predict_mla(rows, devices["a100_80gb_sxm"], MlaCurve()) == 330e-6


@pytest.mark.slow
@pytest.mark.skipif(not MEASURED.exists(), reason="measured MLA kernels are not beside this checkout")
def test_kept_back_head_counts_are_predicted_within_the_target(devices):
    table = pd.read_parquet(MEASURED)
    columns = [*Attention._fields, "batch_size", "seq_len", "kv_len", "latency_us"]
    predicted, measured = [], []
    for gpu, rows in table.groupby("gpu"):
        preset, capability = DEVICES[gpu]
        device = devices[preset]
        kept_back = validation_rows(rows.to_dict("list"), GROUP_BY)
        fitted = rows[~kept_back].iloc[::16][columns].to_dict("list")
        curve = fit_mla(fitted, device, compute_capability=capability).curve
        rest = rows[kept_back].iloc[::2]
        predicted.append(predict_mla(rest[columns].to_dict("list"), device, curve))
        measured.append(rest.latency_us.to_numpy() * 1e-6)
    over_all = errors(np.concatenate(predicted), np.concatenate(measured))
    assert over_all.median < 12
    assert over_all.p90 < 35
