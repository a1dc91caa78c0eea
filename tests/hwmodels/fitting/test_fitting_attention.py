from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.study.errors import errors
from hwmodels.fitting.attention import (
    GROUP_BY,
    capability_of,
    fit_attention,
    fitted_rows,
    memory_tokens,
    predict_decode,
    predict_prefill,
    windows,
)
from hwmodels.fitting.robust import validation_rows
from hwmodels.operators.attention import AttentionCurve, DecodeAttention, HeadLayout, PrefillAttention

OPS = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "ops"


def decode_rows(batch_size, kv_len, **columns):
    """Returns the rows of one layout, each batch size with each length."""
    sizes, lengths = (axis.ravel() for axis in np.meshgrid(batch_size, kv_len))
    return make_rows(len(sizes), {"batch_size": sizes, "kv_len": lengths, **columns})


def prefill_rows(batch_size, seq_len, **columns):
    sizes, lengths = (axis.ravel() for axis in np.meshgrid(batch_size, seq_len))
    return make_rows(
        len(sizes), {"batch_size": sizes, "seq_len": lengths, "attn_dtype": "bfloat16", **columns}
    )


def make_rows(num_rows, columns):
    defaults = {
        "framework": "vllm",
        "kernel": "vllm_flash_attn_fa3",
        "kv_dtype": "bfloat16",
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_dim": 128,
        "window_size": 0,
        "latency_us": 100.0,
    }
    merged = {**defaults, **columns}
    return {name: np.broadcast_to(np.asarray(values), (num_rows,)) for name, values in merged.items()}


def test_decode_rows_beyond_the_cache_get_the_operator_s_price(devices):
    device, curve = devices["h100_sxm"], AttentionCurve()
    rows = decode_rows([64], [8192])
    heads = HeadLayout(num_heads=32, num_kv_heads=8, head_dim=128)
    assert predict_decode(rows, device, curve)[0] == DecodeAttention(heads, device, curve).seconds(
        64, 64 * 8192
    )


def test_prefill_rows_see_no_more_than_their_window(devices):
    device, curve = devices["h100_sxm"], AttentionCurve()
    rows = prefill_rows([2], [1024], window_size=128)
    heads = HeadLayout(num_heads=32, num_kv_heads=8, head_dim=128, windowed=True)
    pairs = 2 * (128 * 129 / 2 + (1024 - 128) * 128)
    expected = PrefillAttention(heads, device, curve).seconds(2, 2048, pairs, 2048)
    assert predict_prefill(rows, device, curve)[0] == expected


def test_contexts_in_the_cache_come_faster_only_where_the_cache_is_faster(devices):
    heads = HeadLayout(num_heads=8, num_kv_heads=1, head_dim=128)
    rtx = devices["rtx_pro_6000_server"]
    tokens = np.array([0.5, 2.0]) * rtx.l2_bytes / heads.kv_bytes_per_token
    gain = 188 * 19e9 / rtx.memory_bandwidth_bytes_per_s
    assert memory_tokens(tokens, heads, rtx) == pytest.approx([tokens[0] / gain, tokens[1]])
    assert memory_tokens(tokens, heads, devices["h100_sxm"]) == pytest.approx(tokens)


def test_rows_faster_than_memory_and_fall_backs_are_not_fitted(devices):
    a100 = devices["a100_80gb_sxm"]
    rows = decode_rows([64], [8192, 16384], latency_us=[800.0, 3000.0])  # 1.07e9 and 2.15e9 bytes at 2.04e12
    assert fitted_rows(rows, a100).tolist() == [False, True]
    rows["kernel"] = np.array(["vllm_flash_attn", "vllm_triton_attn"])
    assert fitted_rows(rows, a100).tolist() == [False, False]


def test_missing_windows_are_full_attention():
    column = pd.Series([0, 128, None], dtype="Int64")
    assert windows({"window_size": column}).tolist() == [np.inf, 128, np.inf]
    assert windows({"window_size": np.array([np.nan, 64.0])}).tolist() == [np.inf, 64]


def test_the_kernels_of_vllm_tell_the_chip():
    assert capability_of(["torch_flow", "vllm_flash_attn_fa2"]) == "sm120"
    with pytest.raises(
        ValueError, match=r"compute_capability: rows name kernels of no chip; give the one to fit"
    ):
        capability_of(["torch_flow"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "preset", "decode_limits", "prefill_limits"),
    [
        ("h100_sxm", "h100_sxm", (11.5, 33.0), (8.0, 24.0)),
        ("b200_sxm", "b200_sxm", (7.5, 25.0), (8.0, 23.0)),
    ],
)
def test_validation_head_layouts_are_within_the_errors_reported(
    devices, gpu, preset, decode_limits, prefill_limits
):
    if not OPS.exists():
        pytest.skip("no measured operators: ../shared/data/ops")
    tables = {}
    for name in ("decode", "prefill"):
        table = pd.read_parquet(OPS / f"attention_{name}.parquet")
        table = table[table.gpu == gpu]
        kept_back = validation_rows(table, GROUP_BY)
        tables[name] = table[~kept_back].iloc[::16], table[kept_back].iloc[::4]
    device = devices[preset]
    curve = fit_attention(tables["decode"][0], tables["prefill"][0], device).curve
    for name, predict, limits in (
        ("decode", predict_decode, decode_limits),
        ("prefill", predict_prefill, prefill_limits),
    ):
        rows = tables[name][1]
        found = errors(predict(rows, device, curve), rows.latency_us.to_numpy() * 1e-6)
        assert found.median < limits[0], name
        assert found.p90 < limits[1], name


def test_a_relative_s_curve_prices_an_unmeasured_device(devices):
    """H200 by the curve of H100: the same chip with more bandwidth."""
    heads = HeadLayout(num_heads=32, num_kv_heads=8, head_dim=128)
    h100, h200 = (
        DecodeAttention(heads, devices[name], replace(AttentionCurve(), kv_bandwidth_share=0.8)).lines(64)
        for name in ("h100_sxm", "h200_sxm")
    )
    assert h200[0] == h100[0]  # short contexts: work items on as many SMs
    assert h200[1][1] == pytest.approx(h100[1][1] * 3.35 / 4.8)
