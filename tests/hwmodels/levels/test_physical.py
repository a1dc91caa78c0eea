"""Latencies that no device could reach are refused."""

from dataclasses import replace

import pytest

from hwmodels.levels.physical import check_physical, least_attention_seconds
from tests.hwmodels.levels.measured_rows import columns, rows_of


def test_a_latency_below_the_physical_limit_is_refused(llama, devices):
    # gate_up_proj: 4,096 x 28,672 x 2 bytes less 50 MiB of L2 take 54.5 us at 3.35e12 bytes/s.
    fast = columns(rows_of("gate_up_proj", "gemm", 32, [1, 2], [54.0, 30.0]))
    with pytest.raises(
        ValueError, match=r"row 1 \(gate_up_proj, 2 rows\): latency_us=30: H100 SXM cannot .* 54.5 us"
    ):
        check_physical(fast, model=llama, device=devices["h100_sxm"])
    # 2 x 4,096 x 4,096 x 28,672 FLOPs at 989.4e12 a second: 972 us. Milliseconds, then.
    wrong_unit = columns(rows_of("gate_up_proj", "gemm", 32, [1, 4_096], [60.0, 1.2]))
    with pytest.raises(ValueError, match="H100 SXM cannot do it in less than 972 us; check the unit"):
        check_physical(wrong_unit, model=llama, device=devices["h100_sxm"])


def test_a_latency_of_attention_below_the_physical_limit_is_refused(llama, devices):
    # 64 x 4,096 tokens of 4,096 bytes less 50 MiB of L2 take 304.9 us at 3.35e12 bytes/s.
    shapes = [(0, 0, 64, 4_096), (4_096, 4_096, 0, 0)]
    h100 = devices["h100_sxm"]
    check_physical(
        columns(rows_of("attention", "attention", 32, shapes, [330, 700])), model=llama, device=h100
    )
    fast = columns(rows_of("attention", "attention", 32, shapes, [0.33, 700]))
    with pytest.raises(ValueError, match=r"row 0 \(attention, 64 rows\): latency_us=0.33: .* 305 us"):
        check_physical(fast, model=llama, device=h100)
    # 4 x 32 x 128 FLOPs for each of 25.2e6 pairs at 989.4e12 a second: 417 us.
    fast = columns(rows_of("attention", "attention", 32, shapes, [330, 0.7]))
    with pytest.raises(ValueError, match=r"row 1 \(attention, 4096 rows\): latency_us=0.7: .* 417 us"):
        check_physical(fast, model=llama, device=h100)
    # On two ranks each has half of the heads.
    check_physical(
        columns(rows_of("attention", "attention", 32, shapes, [150, 350])),
        model=llama,
        device=h100,
        tensor_parallel_size=2,
    )


def test_attention_within_a_window_reads_and_multiplies_no_more_than_it(llama, devices):
    """10 new tokens behind 100, window 50: 500 pairs; 60 tokens decoded at 100 each: 3,000."""
    narrow = replace(llama.blocks[0].attention, window=50)
    model = replace(llama, blocks=(replace(llama.blocks[0], attention=narrow),))
    device = replace(devices["h100_sxm"], l2_bytes=1.0)
    rows = columns(
        rows_of("attention", "attention", 32, [(10, 100, 0, 0), (0, 0, 60, 100), (50, 0, 0, 0)], [1] * 3)
    )
    least_s = least_attention_seconds(rows, model=model, device=device)
    pair_s = 4 * 32 * 128 / device.peak_flops_per_s["bf16"]
    token_s = 4_096 / device.memory_bandwidth_bytes_per_s
    expected = [max(500 * pair_s, 50 * token_s), 3_000 * token_s, max(1_275 * pair_s, 50 * token_s)]
    assert least_s == pytest.approx(expected, rel=1e-4)
    assert least_attention_seconds(rows, model=llama, device=device)[1] == pytest.approx(
        6_000 * token_s, rel=1e-4
    )


def test_nanoseconds_in_a_column_of_microseconds_are_refused(llama, devices):
    slow = columns(rows_of("gate_up_proj", "gemm", 32, [1, 2], [60_000.0, 61_000.0]))
    with pytest.raises(
        ValueError, match=r"profile, gate_up_proj: latency_us: large rows take 1,1\d\d times as long as H100"
    ):
        check_physical(slow, model=llama, device=devices["h100_sxm"])
    # Small ones are launches, however long those take.
    small = columns(rows_of("o_proj", "gemm", 32, [1, 2], [60_000.0, 61_000.0]))
    check_physical(small, model=llama, device=devices["h100_sxm"])


def test_weights_that_fit_into_the_cache_may_be_faster_than_memory(llama, devices):
    # 50.3 MB: less than the 128 MiB of an RTX PRO 6000, of which memory alone would need 31.5 us.
    rows = columns(rows_of("qkv_proj", "gemm", 32, [1, 2], [5.0, 5.0]))
    check_physical(rows, model=llama, device=devices["rtx_pro_6000_server"])
    with pytest.raises(ValueError, match="V100"):
        check_physical(rows, model=llama, device=devices["v100_sxm"])
