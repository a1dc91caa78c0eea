"""The shortest possible times, by hand: 1e15 FLOP/s, 1e12 bytes/s of memory, 1e11 bytes/s between devices."""

import numpy as np
import pytest

from hwmodels.device import Device, Link
from hwmodels.fitting import limits


@pytest.fixture(scope="module")
def device():
    return Device(
        name="round",
        memory_bytes=1e11,
        memory_bandwidth_bytes_per_s=1e12,
        peak_flops_per_s={"bf16": 1e15, "fp8": 2e15},
        num_sms=100,
        l2_bytes=1e6,
        tdp_w=500,
        idle_w=50,
        pcie=Link(name="link", bandwidth_bytes_per_s=1e11, latency_s=1e-6),
        price_usd_per_hour=1.0,
        price_source="test, 2026",
        source="test",
    )


def rows(**columns):
    return {name: np.atleast_1d(np.asarray(values)) for name, values in columns.items()}


def test_slowness_is_the_median_of_the_large_rows():
    least_s = np.array([1e-6, 10e-6, 20e-6, 100e-6])
    assert limits.slowness(np.array([1.0, 20e-6, 60e-6, 400e-6]), least_s) == pytest.approx(3)
    assert limits.slowness(np.array([1.0]), least_s[:1]) == 1


def test_gemm_is_bound_by_arithmetic_or_by_what_the_cache_cannot_hold(device):
    columns = rows(
        m=[10_000, 1, 10_000, 1],
        n=[10_000] * 4,
        k=[10_000] * 4,
        dtype=["bfloat16", "bfloat16", "fp8", "int4_wo"],
    )
    weights = 1e8
    expected = [
        2e12 / 1e15,
        (2 * weights + 40_000 - 1e6) / 1e12,
        2e12 / 2e15,
        (weights * (0.5 + 2.5 / 128) + 40_000 - 1e6) / 1e12,
    ]
    assert limits.least_gemm_seconds(columns, device) == pytest.approx(expected)


def test_decode_reads_keys_and_values_once_within_the_window(device):
    columns = rows(
        batch_size=[64, 64, 1],
        kv_len=[1000, 1000, 10],
        num_kv_heads=[8, 8, 8],
        head_dim=[128, 128, 128],
        kv_dtype=["bfloat16", "fp8", "bfloat16"],
        window_size=[0, 100, 0],
    )
    token = 2 * 8 * 128
    expected = [(64_000 * token * 2 - 1e6) / 1e12, (6_400 * token - 1e6) / 1e12, 0.0]
    assert limits.least_decode_seconds(columns, device) == pytest.approx(expected)


def test_prefill_computes_the_pairs_that_the_mask_leaves(device):
    columns = rows(
        batch_size=[2, 2, 2],
        seq_len=[1000, 1000, 1000],
        num_heads=[32, 32, 32],
        head_dim=[128, 128, 128],
        attn_dtype=["bfloat16", "bfloat16", "fp8"],
        kv_dtype=["bfloat16", "bfloat16", "fp8"],
        window_size=[0, 100, 0],
    )
    pair = 4 * 32 * 128
    full, windowed = 2 * 1000 * 1001 / 2, 2 * (100 * 101 / 2 + 900 * 100)
    expected = [full * pair / 1e15, windowed * pair / 1e15, full * pair / 2e15]
    assert limits.least_prefill_seconds(columns, device) == pytest.approx(expected)


def test_mla_reads_latent_vectors_or_multiplies_expanded_heads(device):
    columns = rows(
        phase=["decode", "prefill"],
        num_heads=[128, 128],
        batch_size=[64, 1],
        seq_len=[1, 1000],
        kv_len=[10_000, 1500],
        mla_dtype=["bfloat16", "bfloat16"],
        kv_dtype=["bfloat16", "bfloat16"],
    )
    pairs = 1000 * (500 + 1001 / 2)
    expected = [(640_000 * 576 * 2 - 1e6) / 1e12, pairs * 2 * 128 * (128 + 64 + 128) / 1e15]
    assert limits.least_mla_seconds(columns, device) == pytest.approx(expected)


def test_moe_computes_the_tokens_experts_shared_by_ranks(device):
    columns = rows(
        num_tokens=[1000, 1000],
        topk=[2, 6],
        hidden_size=[4096, 2688],
        inter_size=[14336, 1856],
        moe_tp_size=[2, 1],
        moe_ep_size=[4, 1],
        dtype=["bfloat16", "fp8"],
    )
    gated, plain = 3 * 4096 * 14336, 2 * 2688 * 1856
    expected = [2 * 1000 * 2 * gated / 8 / 1e15, 2 * 1000 * 6 * plain / 2e15]
    assert limits.least_moe_seconds(columns, device) == pytest.approx(expected)


def test_a_rank_receives_what_the_others_have(device):
    columns = rows(num_gpus=[8, 2], bytes=[8_000_000, 8_000_000])
    assert limits.least_collective_seconds(columns, device) == pytest.approx([70e-6, 40e-6])
