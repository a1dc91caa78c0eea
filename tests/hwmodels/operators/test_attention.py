from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.device import Device, Link
from hwmodels.iterations import causal_pairs
from hwmodels.operators.attention import (
    KERNELS,
    AttentionCurve,
    DecodeAttention,
    HeadLayout,
    PrefillAttention,
)

H100 = Device(
    name="H100 SXM",
    memory_bytes=85e9,
    memory_bandwidth_bytes_per_s=3.35e12,
    peak_flops_per_s={"bf16": 989.4e12, "fp16": 989.4e12, "fp8": 1978.9e12},
    num_sms=132,
    l2_bytes=50e6,
    tdp_w=700,
    idle_w=70,
    pcie=Link(name="PCIe", bandwidth_bytes_per_s=64e9, latency_s=2.5e-6),
    price_usd_per_hour=1.0,
    price_source="test",
    source="test",
)
LLAMA_8B = HeadLayout(num_heads=32, num_kv_heads=8, head_dim=128)
CURVE = AttentionCurve()


def decode_attention_lines(num_seqs, heads, device, curve, kernels="vllm"):
    """Returns the lines of one row a sequence as (seconds, seconds per context token)."""
    lines = DecodeAttention(heads, device, curve, kernels).lines(num_seqs)
    assert all(pair_s == row_s == 0 for _, _, pair_s, row_s in lines)
    return [line[:2] for line in lines]


def decode_attention_seconds(num_seqs, context_tokens, heads, device, curve, *, kernels="vllm"):
    return DecodeAttention(heads, device, curve, kernels).seconds(num_seqs, context_tokens)


def prefill_attention_seconds(
    num_seqs, new_tokens, pairs, context_tokens, heads, device, curve, *, kernels="vllm", compute_dtype="bf16"
):
    attention = PrefillAttention(heads, device, curve, kernels, compute_dtype)
    return attention.seconds(num_seqs, new_tokens, pairs, context_tokens)


libraries_and_chips = st.sampled_from(sorted(KERNELS))
layouts = st.builds(
    lambda kv_heads, group, head_dim, kv_bytes, windowed: HeadLayout(
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        kv_bytes_per_element=kv_bytes,
        windowed=windowed,
    ),
    st.sampled_from([1, 2, 8, 32]),
    st.sampled_from([1, 4, 8, 16, 48]),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([1.0, 2.0]),
    st.booleans(),
)


def test_long_contexts_take_their_bytes_over_the_bandwidth_reached():
    seconds = decode_attention_seconds(64, 64 * 4096, LLAMA_8B, H100, CURVE)
    stream_s = 64 * 4096 * 2 * 8 * 128 * 2 / (0.82 * 3.35e12)
    assert stream_s == pytest.approx(390.9e-6, rel=1e-3)
    assert seconds == pytest.approx(9.5e-6 + 2.5e-6 + stream_s, rel=1e-9)


def test_short_contexts_take_waves_of_work_items():
    seconds = decode_attention_seconds(512, 512 * 16, LLAMA_8B, H100, CURVE)
    waves = 512 * 8 / 132  # 31.0, of which half a wave is in the start
    assert seconds == pytest.approx(9.5e-6 + 3.65e-6 * (waves - 0.5), rel=1e-9)


def test_whole_prompt_matches_its_terms():
    seconds = prefill_attention_seconds(1, 2048, causal_pairs(2048), 2048, LLAMA_8B, H100, CURVE)
    pair_s = 4 * 128 / (0.9 * 989.4e12) + 1 / (132 * 45e9)
    products_s = 32 * pair_s * 2048 * 2049 / 2
    assert products_s == pytest.approx(49.9e-6, rel=1e-3)
    tiles_s = 32 / 132 * 0.8 * 6.4e-6 * (2048 / 128 + 0.05)
    passes_s = 4 * (2 * 8 * 128 * 2) * 2048 / (0.82 * 3.35e12)
    chain_s = 0.7 * 2048 * 128 * 132 * pair_s
    assert seconds == pytest.approx(1.2 * 10e-6 + products_s + tiles_s + passes_s + chain_s / 2, rel=1e-9)


def test_short_chunk_on_a_long_prefix_waits_for_its_one_chain_of_keys():
    seconds = prefill_attention_seconds(1, 16, causal_pairs(16, 65_520), 65_536, LLAMA_8B, H100, CURVE)
    pair_s = 4 * 128 / (0.9 * 989.4e12) + 1 / (132 * 45e9)
    assert seconds == pytest.approx(1.2 * 10e-6 + 0.7 * 65_536 * 128 * 132 * pair_s, rel=1e-9)


def test_fp8_keys_and_values_are_converted_on_the_sms_of_hopper():
    fp8 = replace(LLAMA_8B, kv_bytes_per_element=1.0)
    (_, _), (_, token_s), _ = decode_attention_lines(256, fp8, H100, CURVE)
    assert token_s == pytest.approx(2 * 8 * 128 / (18e9 * 132), rel=1e-9)
    assert token_s > 2 * 8 * 128 / (0.82 * 3.35e12)


def test_one_sequence_keeps_only_as_many_sms_busy_as_its_context_has_parts():
    one_kv_head = HeadLayout(num_heads=8, num_kv_heads=1, head_dim=128)
    (_, _), (_, token_s), _ = decode_attention_lines(1, one_kv_head, H100, CURVE)
    (_, _), (_, all_busy_s), _ = decode_attention_lines(132, one_kv_head, H100, CURVE)
    assert token_s == pytest.approx(all_busy_s * 132 / 32, rel=1e-9)  # 32 parts at most


def test_groups_that_no_kernel_packs_read_keys_once_a_head():
    def stream_s(num_heads):
        heads = HeadLayout(num_heads=num_heads, num_kv_heads=1, head_dim=128)
        return decode_attention_lines(512, heads, H100, CURVE, "trtllm")[1][1]

    assert stream_s(96) == pytest.approx(2 * stream_s(48), rel=1e-9)
    assert stream_s(64) > 20 * stream_s(32)  # 32 query heads still share a pass


def test_flash_attention_2_takes_windows_head_by_head():
    heads = HeadLayout(num_heads=64, num_kv_heads=8, head_dim=64)
    ampere = replace(CURVE, compute_capability="sm80")
    full = decode_attention_seconds(256, 256 * 64, heads, H100, ampere)
    windowed = decode_attention_seconds(256, 256 * 64, replace(heads, windowed=True), H100, ampere)
    assert windowed > 4 * full


def test_window_of_flash_attention_3_meets_one_tile_more():
    windowed = replace(LLAMA_8B, windowed=True)
    full_s = decode_attention_seconds(512, 512 * 16, LLAMA_8B, H100, CURVE) - 9.5e-6
    windowed_s = decode_attention_seconds(512, 512 * 16, windowed, H100, CURVE) - 9.5e-6 - 2.5e-6
    assert windowed_s == pytest.approx(1.6 * full_s, rel=1e-9)


def test_fp16_is_priced_as_bf16():
    bf16 = prefill_attention_seconds(1, 512, causal_pairs(512), 512, LLAMA_8B, H100, CURVE)
    fp16 = prefill_attention_seconds(
        1, 512, causal_pairs(512), 512, LLAMA_8B, H100, CURVE, compute_dtype="fp16"
    )
    assert fp16 == bf16


@given(libraries_and_chips, layouts)
def test_no_sequences_take_no_time(choice, heads):
    curve = replace(CURVE, compute_capability=choice[1])
    assert DecodeAttention(heads, H100, curve, choice[0]).seconds(0, 0) == 0
    assert PrefillAttention(heads, H100, curve, choice[0]).seconds(0, 0, 0, 0) == 0


@given(
    libraries_and_chips, layouts, st.lists(st.integers(1, 3000), min_size=2, max_size=6), st.integers(1, 9000)
)
def test_arrays_equal_numbers_to_the_last_bit(choice, heads, counts, length):
    curve = replace(CURVE, compute_capability=choice[1])
    decode = DecodeAttention(heads, H100, curve, choice[0])
    num_seqs = np.array(counts)
    context = num_seqs * length
    assert decode.seconds(num_seqs, context).tolist() == [decode.seconds(n, n * length) for n in counts]
    growing = np.arange(counts[0], counts[0] + 5000, 1000)
    assert decode.seconds(counts[0], growing).tolist() == [decode.seconds(counts[0], int(c)) for c in growing]

    prefill = PrefillAttention(heads, H100, curve, choice[0])
    cached = np.array(counts) * 7
    pairs, contexts = causal_pairs(length, cached), cached + length
    one_by_one = [prefill.seconds(1, length, int(p), int(c)) for p, c in zip(pairs, contexts, strict=True)]
    assert prefill.seconds(1, length, pairs, contexts).tolist() == one_by_one


@given(libraries_and_chips, layouts, st.integers(1, 2000), st.integers(1, 50_000))
def test_decode_is_the_largest_of_its_lines(choice, heads, num_seqs, length):
    curve = replace(CURVE, compute_capability=choice[1])
    lines = decode_attention_lines(num_seqs, heads, H100, curve, choice[0])
    seconds = decode_attention_seconds(num_seqs, num_seqs * length, heads, H100, curve, kernels=choice[0])
    assert len(lines) <= 3
    assert seconds == pytest.approx(max(a + b * num_seqs * length for a, b in lines), rel=1e-12)


@given(libraries_and_chips, layouts, st.integers(1, 2000), st.integers(1, 50_000))
def test_more_work_is_never_faster_and_more_bandwidth_never_slower(choice, heads, num_seqs, length):
    library, curve = choice[0], replace(CURVE, compute_capability=choice[1])
    wider = replace(H100, memory_bandwidth_bytes_per_s=2 * 3.35e12)

    def decode_s(n, context, device=H100):
        return decode_attention_seconds(n, context, heads, device, curve, kernels=library)

    def prefill_s(n, cached, device=H100):
        return prefill_attention_seconds(
            1, n, causal_pairs(n, cached), n + cached, heads, device, curve, kernels=library
        )

    base_s = decode_s(num_seqs, num_seqs * length)
    slack = 1 + 1e-12
    assert base_s <= slack * decode_s(num_seqs, num_seqs * (length + 1))
    assert base_s <= slack * decode_s(num_seqs + 1, (num_seqs + 1) * length)
    assert decode_s(num_seqs, num_seqs * length, wider) <= slack * base_s
    base_s = prefill_s(num_seqs, length)
    assert base_s <= slack * prefill_s(num_seqs + 1, length)
    assert base_s <= slack * prefill_s(num_seqs, length + 1)
    assert prefill_s(num_seqs, length, wider) <= slack * base_s


def test_four_bit_keys_and_values_are_unpacked_by_cuda_cores():
    """A100, 40 heads of 128, a token: 10,240 elements of 5 operations at 19.5e12 / 2 a second are 5.25 ns,
    more than their 5,440 bytes take at 0.82 x 2.039e12 bytes/s, 3.3 ns; 8-bit ones take 6.1 ns.
    """
    a100 = replace(
        H100,
        memory_bandwidth_bytes_per_s=2.039e12,
        peak_flops_per_s={"fp32": 19.5e12, "bf16": 312e12},
        num_sms=108,
    )
    curve = AttentionCurve(compute_capability="sm80")
    packed = HeadLayout(num_heads=40, num_kv_heads=40, head_dim=128, kv_bytes_per_element=0.53125)
    bytes_each = replace(packed, kv_bytes_per_element=1.0)

    def token_s(heads):
        longer, shorter = (decode_attention_seconds(64, 64 * n, heads, a100, curve) for n in (8192, 4096))
        return (longer - shorter) / (64 * 4096)

    assert token_s(packed) == pytest.approx(5 * 10_240 / (19.5e12 / 2), rel=1e-6)
    assert token_s(bytes_each) == pytest.approx(10_240 / (curve.kv_bandwidth_share * 2.039e12), rel=0.1)


def test_four_bits_take_no_less_conversion_than_eight():
    """Flash attention 3 over fp8 converts 18e9 elements an SM and second: as many of 4 bits."""
    eight = replace(LLAMA_8B, kv_bytes_per_element=1.0)
    four = replace(LLAMA_8B, kv_bytes_per_element=0.53125)
    times = [decode_attention_seconds(64, 64 * 4096, heads, H100, CURVE) for heads in (eight, four)]
    assert times[0] == times[1]


def test_rejects_kernels_of_an_unknown_library():
    with pytest.raises(ValueError, match=r"kernels=cudnn: must be one of trtllm, vllm"):
        DecodeAttention(LLAMA_8B, H100, CURVE, "cudnn")


def test_rejects_an_unknown_compute_capability():
    with pytest.raises(
        ValueError, match=r"compute_capability=sm70: must be one of sm100, sm120, sm80, sm89, sm90"
    ):
        AttentionCurve(compute_capability="sm70")


def test_rejects_figures_that_cannot_be():
    with pytest.raises(ValueError, match=r"tile_s=-1e-06: must be a finite number > 0"):
        AttentionCurve(tile_s=-1e-6)
    with pytest.raises(ValueError, match=r"num_kv_heads=16: must be <= num_heads=8"):
        HeadLayout(num_heads=8, num_kv_heads=16, head_dim=128)
