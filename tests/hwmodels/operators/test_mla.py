"""Prices of latent attention against hand calculations, and laws that any price obeys."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwmodels.operators.mla import (
    MlaCurve,
    MlaDecode,
    MlaHeads,
    MlaPrefill,
)

DEEPSEEK = MlaHeads(num_heads=128)
CURVE = MlaCurve()
CURVES = {
    "t4": MlaCurve(compute_capability="sm80"),
    "a100_80gb_sxm": MlaCurve(compute_capability="sm80"),
    "h100_sxm": CURVE,
    "b200_sxm": MlaCurve(compute_capability="sm100"),
    "rtx_pro_6000_server": MlaCurve(compute_capability="sm120"),
}

presets = st.sampled_from(list(CURVES))
kernels = st.sampled_from(["vllm", "trtllm"])
layouts = st.builds(
    MlaHeads, num_heads=st.sampled_from([1, 16, 20, 128]), kv_bytes_per_element=st.sampled_from([1.0, 2.0])
)
seq_counts = st.integers(0, 1024)
lengths = st.integers(1, 131_072)


def prefill(num_seqs, new_tokens, cached_tokens, device, **settings):
    """Computes the seconds of num_seqs equal chunks."""
    price = MlaPrefill(**{"heads": DEEPSEEK, "curve": CURVE, "device": device, **settings})
    return price.seconds(
        num_seqs,
        num_seqs * new_tokens,
        num_seqs * (new_tokens * cached_tokens + new_tokens * (new_tokens + 1) / 2),
        num_seqs * (new_tokens + cached_tokens),
    )


def test_latents_and_flops_are_those_of_the_paper():
    assert (
        DEEPSEEK.latent_bytes_per_token == 1152
    )  # multi-head: 128 x (192 + 128) x 2 bytes, 71 times as many
    assert DEEPSEEK.decode_flops_per_token == 278_528
    assert DEEPSEEK.prefill_flops_per_pair == 81_920


def test_decode_matches_its_worked_number(devices):
    seconds = MlaDecode(DEEPSEEK, devices["h100_sxm"], CURVE, kernels="trtllm").seconds(64, 64 * 4096)
    assert seconds == pytest.approx(150.9e-6, abs=0.1e-6)


def test_prefill_matches_its_worked_number(devices):
    assert prefill(1, 4096, 0, devices["h100_sxm"], kernels="trtllm") == pytest.approx(1484e-6, abs=1e-6)


def test_few_heads_take_the_time_of_reading_latents_once(devices):
    device = devices["h100_sxm"]
    sixteen, sixty_four = (MlaDecode(MlaHeads(num_heads=h), device, CURVE).lines(8)[0][1] for h in (16, 64))
    assert sixteen == sixty_four == pytest.approx(1152 / (3.35e12 * 0.76), rel=1e-6)


def test_latents_of_one_byte_are_multiplied_as_fp8_on_blackwell_only(devices):
    heads = replace(DEEPSEEK, kv_bytes_per_element=1.0)
    (_, hopper_s, _, _), (_, blackwell_s, _, _) = (
        MlaDecode(heads, devices[name], CURVES[name]).lines(8)[0] for name in ("h100_sxm", "b200_sxm")
    )
    assert hopper_s == pytest.approx(278_528 / (0.6 * 989.4e12), rel=1e-3)
    assert blackwell_s == pytest.approx(278_528 / (0.6 * 4500e12), rel=0.02)


def test_one_context_is_read_by_64_sms(devices):
    """Of 132; three sequences keep all of them busy. A long context alone takes 132 / 64 times as long."""
    lines = MlaDecode(DEEPSEEK, devices["h100_sxm"], CURVE).lines
    one, two, three, many = (lines(n)[0][1] for n in (1, 2, 3, 64))
    assert one == pytest.approx(132 / 64 * many)
    assert two == pytest.approx(132 / 128 * many)
    assert three == many


def test_generic_kernels_read_a_single_context_on_one_sm(devices):
    """RTX PRO 6000: 9e-3 x 13 us a token, shared by as many sequences as there are."""
    gpu = "rtx_pro_6000_server"
    lines = MlaDecode(DEEPSEEK, devices[gpu], CURVES[gpu], kernels="trtllm").lines(4)
    (_, shared_s, _, _), (_, alone_s, _, _) = lines
    assert alone_s == pytest.approx(9e-3 * 13e-6 / 4)
    assert shared_s < alone_s


def test_a_better_data_sheet_runs_the_same_kernels(devices):
    """The chip tells the kernels, not its FLOP/s: four times as many, and contexts are still not split."""
    device, curve = devices["rtx_pro_6000_server"], CURVES["rtx_pro_6000_server"]
    better = replace(device, peak_flops_per_s={d: 4 * p for d, p in device.peak_flops_per_s.items()})
    slow, fast = (MlaDecode(DEEPSEEK, d, curve, kernels="trtllm").lines(4) for d in (device, better))
    assert len(slow) == len(fast) == 2
    assert fast[1] == slow[1]


def test_a_single_long_prompt_of_one_head_waits_for_its_last_tile(devices):
    # 128 queries x 32,768 keys x 640 FLOPs on one of 132 SMs
    sm_flops_per_s = 989.4e12 * 0.55 / 132
    seconds = prefill(1, 32768, 0, devices["h100_sxm"], heads=MlaHeads(num_heads=1), kernels="trtllm")
    assert seconds == pytest.approx(1.35 * 13e-6 + 128 * 32768 * 640 / sm_flops_per_s, rel=1e-3)


def test_prefill_in_fp8_saves_time_on_long_prompts_only(devices):
    def seconds(new_tokens, kv_bytes):
        heads = replace(DEEPSEEK, kv_bytes_per_element=kv_bytes)
        return prefill(8, new_tokens, 0, devices["h100_sxm"], heads=heads, kernels="trtllm")

    assert seconds(128, 1.0) > seconds(128, 2.0)
    assert seconds(16384, 1.0) < seconds(16384, 2.0)


def test_chips_without_fp8_prefill_in_bf16(devices):
    device = devices["a100_80gb_sxm"]
    assert prefill(2, 512, 0, device, compute_dtype="fp8") == prefill(2, 512, 0, device)


@given(preset=presets, kernels=kernels, heads=layouts)
def test_no_sequences_cost_nothing(devices, preset, kernels, heads):
    settings = {"heads": heads, "device": devices[preset], "curve": CURVES[preset], "kernels": kernels}
    assert MlaDecode(**settings).seconds(0, 0) == 0
    assert prefill(0, 0, 0, **settings) == 0


@given(preset=presets, kernels=kernels, heads=layouts, n=seq_counts, length=lengths)
def test_decode_is_the_largest_of_its_lines(devices, preset, kernels, heads, n, length):
    settings = {"heads": heads, "device": devices[preset], "curve": CURVES[preset], "kernels": kernels}
    lines = MlaDecode(**settings).lines(n)
    assert len(lines) <= 3
    assert all(pair_s == row_s == 0 for _, _, pair_s, row_s in lines)
    largest = max(fixed_s + token_s * n * length for fixed_s, token_s, _, _ in lines)
    assert MlaDecode(**settings).seconds(n, n * length) == pytest.approx(largest, rel=1e-12)


@given(
    preset=presets,
    kernels=kernels,
    heads=layouts,
    shapes=st.lists(st.tuples(seq_counts, lengths, lengths), min_size=1, max_size=9),
)
def test_arrays_are_priced_as_numbers_are(devices, preset, kernels, heads, shapes):
    settings = {"heads": heads, "device": devices[preset], "curve": CURVES[preset], "kernels": kernels}
    n, new, cached = (np.array(column, dtype=np.float64) for column in zip(*shapes, strict=True))
    rows = [tuple(map(float, shape)) for shape in shapes]
    decodes = [MlaDecode(**settings).seconds(a, a * c) for a, _, c in rows]
    assert MlaDecode(**settings).seconds(n, n * cached).tolist() == decodes
    assert prefill(n, new, cached, **settings).tolist() == [prefill(*row, **settings) for row in rows]


@given(
    preset=presets,
    kernels=kernels,
    heads=layouts,
    n=st.integers(1, 512),
    new=lengths,
    cached=lengths,
    more=lengths,
    gain=st.floats(1.0, 8.0),
)
def test_less_work_and_better_chips_are_never_slower(
    devices, preset, kernels, heads, n, new, cached, more, gain
):
    device = devices[preset]
    better = replace(
        device,
        memory_bandwidth_bytes_per_s=gain * device.memory_bandwidth_bytes_per_s,
    )
    settings = {"heads": heads, "device": device, "curve": CURVES[preset], "kernels": kernels}

    def decode(num_tokens, **changed):
        return MlaDecode(**{**settings, **changed}).seconds(n, n * num_tokens)

    allowed = 1 + 1e-12
    assert decode(cached) <= decode(cached + more) * allowed
    assert prefill(n, new, cached, **settings) <= prefill(n, new, cached + more, **settings) * allowed
    assert decode(cached, device=better) <= decode(cached) * allowed
    assert (
        prefill(n, new, cached, **{**settings, "device": better})
        <= prefill(n, new, cached, **settings) * allowed
    )


def test_rejects_what_makes_no_sense(devices):
    with pytest.raises(ValueError, match=r"kernels=sglang: must be one of vllm, trtllm"):
        MlaDecode(DEEPSEEK, devices["h100_sxm"], CURVE, kernels="sglang").lines(1)
    with pytest.raises(ValueError, match=r"flops_share=1.5: must be a share"):
        MlaCurve(flops_share=1.5)
    with pytest.raises(
        ValueError, match="compute_capability=sm70: must be one of sm80, sm89, sm90, sm100, sm120"
    ):
        MlaCurve(compute_capability="sm70")
    with pytest.raises(ValueError, match=r"num_heads=0"):
        MlaHeads(num_heads=0)
