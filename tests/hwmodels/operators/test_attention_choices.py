"""Attention kernels by name: the ratios of their prices are the published ones."""

from dataclasses import replace

import pytest

from hwmodels.assembly.roofline import Roofline
from hwmodels.assembly.site import Kernels
from hwmodels.iterations import causal_pairs
from hwmodels.operators.attention import AttentionCurve, DecodeAttention, HeadLayout, PrefillAttention

SM80, SM90 = AttentionCurve(compute_capability="sm80"), AttentionCurve(compute_capability="sm90")


def prefill_s(devices, device, curve, kernels, *, head_dim=128, length=8192):
    """Returns seconds of one causal prompt, with as many heads as make the width 2,048."""
    num_heads = 2048 // head_dim
    heads = HeadLayout(num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim)
    prefill = PrefillAttention(heads, devices[device], curve, kernels)
    return prefill.seconds(1, length, causal_pairs(length), length)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [4096, 16384])
def test_ratios_on_an_a100_are_the_published_ones(devices, head_dim, length):
    """FlashAttention is 2 to 4 times as fast as standard attention, FlashAttention-2 3 to 10 times."""
    standard_s, first_s, second_s = (
        prefill_s(devices, "a100_80gb_sxm", SM80, name, head_dim=head_dim, length=length)
        for name in ("standard", "flash_attention_1", "flash_attention_2")
    )
    assert 2 <= standard_s / first_s <= 4.5
    assert 4.3 <= standard_s / second_s <= 9
    assert 1.6 <= first_s / second_s <= 2


@pytest.mark.parametrize("length", [4096, 16384])
def test_the_third_is_up_to_twice_as_fast_on_an_h100(devices, length):
    second_s, third_s = (
        prefill_s(devices, "h100_sxm", SM90, name, length=length)
        for name in ("flash_attention_2", "flash_attention_3")
    )
    assert 1.5 <= second_s / third_s <= 2.0


def test_splitting_a_long_context_uses_all_sms(devices):
    """One sequence of 64 K tokens, 32 query heads on 108 SMs; published: up to 8 times."""
    heads = HeadLayout(num_heads=32, num_kv_heads=8, head_dim=128)
    unsplit_s, split_s = (
        DecodeAttention(heads, devices["a100_80gb_sxm"], SM80, name).seconds(1, 65536)
        for name in ("flash_attention_2", "flash_decoding")
    )
    assert 5 < unsplit_s / split_s < 10


def test_many_sequences_gain_nothing_from_splitting(devices):
    heads = HeadLayout(num_heads=32, num_kv_heads=32, head_dim=128)
    unsplit_s, split_s = (
        DecodeAttention(heads, devices["a100_80gb_sxm"], SM80, name).seconds(256, 256 * 4096)
        for name in ("flash_attention_2", "flash_decoding")
    )
    assert unsplit_s <= split_s < 1.05 * unsplit_s


def test_the_choice_changes_the_attention_of_a_model_only(models, devices, make_shape):
    plain, chosen = (
        Roofline(model=models["llama3_1_8b"], device=devices["h100_sxm"], kernels=kernels).breakdown(
            make_shape(chunks=[(8192, 0)])
        )
        for kernels in (Kernels(), Kernels(attention_kernels="standard"))
    )
    assert chosen["attention"] > 2 * plain["attention"]
    assert chosen["gemm"] == plain["gemm"]


def test_rejects_unknown_kernels():
    with pytest.raises(ValueError, match="attention_kernels=flash: must be one of standard"):
        replace(Kernels(), attention_kernels="flash")


def test_the_third_runs_on_hopper_only(devices):
    with pytest.raises(
        ValueError, match="attention_kernels=flash_attention_3: runs on sm90 only, not on sm80"
    ):
        prefill_s(devices, "a100_80gb_sxm", SM80, "flash_attention_3")
