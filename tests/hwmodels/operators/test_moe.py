"""Prices of routed experts against hand calculations, and laws that any price obeys."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hwmodels.model.weights import WEIGHT_FORMATS
from hwmodels.operators.moe import (
    FAMILIES,
    MoeCurve,
    common_height,
    kernel_family,
    moe_flops,
    moe_weight_bytes,
    tiles_of,
)
from hwmodels.operators.moe_routing import Routing, rank_loads
from tests.hwmodels.operators.moe_layers import (
    BALANCED,
    DEEPSEEK,
    MIXTRAL,
    SKEWED,
    UNIFORM,
    ZIPF,
    formats,
    layers,
    routings,
    seconds,
    token_counts,
)


def test_one_token_of_mixtral_on_h100_matches_hand_calculation(devices):
    """Two experts, Triton (7 kernels, fill depth 60), default curve; up and gate 4096 x 28672, down back."""
    up_bytes, down_bytes = 2 * 2 * 28672 * (4096 + 60), 2 * 2 * 4096 * (14336 + 60)
    bytes_per_s = 0.95 * 3.35e12
    # two experts' tiles of 8 rows, 12 more to fill each; the share counts full tiles of 128 with their fill
    flops_per_s = 989.4e12 * 0.70 * (128 + 12) / 128
    up = np.hypot(up_bytes / bytes_per_s, up_bytes / 4 * 2 * 40 / flops_per_s)
    down = np.hypot(down_bytes / bytes_per_s, down_bytes / 4 * 2 * 40 / flops_per_s)
    permute = 2 * (28672 + 28672 + 14336 + 4096 + 4096) * 2 / (0.44 * 3.35e12)

    by_hand = 7 * 5.3e-6 + up + down + permute

    assert by_hand == pytest.approx(262.0e-6, rel=1e-3)
    assert seconds(1, device=devices["h100_sxm"]) == pytest.approx(by_hand)


def test_flops_and_bytes_match_closed_forms():
    assert moe_flops(1, MIXTRAL) == pytest.approx(704.6e6, rel=1e-4)
    assert moe_flops([1, 10], replace(MIXTRAL, gated=False)).tolist() == [469_762_048, 4_697_620_480]
    # one token visits two of eight experts
    assert moe_weight_bytes(1, MIXTRAL, WEIGHT_FORMATS["bf16"], UNIFORM) == pytest.approx(704.6e6, rel=1e-4)
    assert moe_weight_bytes(64, MIXTRAL, WEIGHT_FORMATS["fp8"], BALANCED) == 8 * 3 * 4096 * 14336


@example(layer=DEEPSEEK, weights="int4_wo", exponent=0)
@given(layer=layers, weights=formats, exponent=st.sampled_from([0, 0.25, 0.5, 0.8]))
def test_one_token_more_never_jumps(devices, layer, weights, exponent):
    """A share of 1/m more tokens raises the price by that share at most, and by 1 % where tiles fill up.

    Marlin, here for int4_wo, takes higher tiles for all experts from some number of tokens on. If each expert
    has one tile, the rows that are computed rise as their height does: the price rises by that ratio at most.
    """
    routing = Routing(kind="zipf", exponent=exponent)
    counts, h100 = np.arange(1, 1000), devices["h100_sxm"]
    t = seconds(counts, layer, device=h100, weights=weights, routing=routing)
    growth = t[1:] / t[:-1]
    family = FAMILIES[kernel_family(h100, layer, WEIGHT_FORMATS[weights], compute_capability="sm90")]
    heights = np.ones(len(counts))
    if family.tile_rows:
        heights = common_height(1.0 * counts * layer.top_k, layer, family.tile_rows)
    assert (growth >= 1).all()
    assert (growth <= (1.01 + 1 / counts[:-1]) * heights[1:] / heights[:-1]).all()


@pytest.mark.parametrize(("before", "higher"), [(57, 2), (115, 1.5), (172, 4 / 3)])
def test_marlin_jumps_where_its_tiles_become_higher(devices, before, higher):
    """0.9 x 16, 32 and 48 tokens for each of 32 experts of a rank: 57.6, 115.2 and 172.8 tokens.

    So do measured rows on H100 with 1.2 to 1.25 times the tokens: by 27, 24 and 31 % (medians) where the
    height changes there, by 2 to 5 % elsewhere.
    """
    step = np.array([before, before + 1])
    few, more = seconds(step, DEEPSEEK, device=devices["h100_sxm"], weights="int4_wo", routing=UNIFORM)
    assert 1.15 < more / few < higher


def test_mixtral_has_no_step_where_assignments_outnumber_experts(devices):
    """8 to 10 assignments on 8 experts: a benchmark's generator steps there, engines do not."""
    h100 = devices["h100_sxm"]
    four, five = seconds([4, 5], device=h100, routing=ZIPF)
    assert 1 < five / four < 1.15
    four, five = seconds([4, 5], device=h100, routing=SKEWED)
    assert five / four > 1.4


def test_a_thousand_counts_take_milliseconds(devices):
    layer, counts = replace(DEEPSEEK, ep_size=1, num_experts=512), np.arange(1, 1001)
    taken = []
    for _ in range(5):
        start = time.process_time()
        seconds(counts, layer, device=devices["h100_sxm"], routing=ZIPF)
        taken.append(time.process_time() - start)
    assert min(taken) < 0.1


@given(num_tokens=token_counts, more=st.integers(1, 5000), layer=layers, routing=routings, weights=formats)
def test_more_tokens_are_never_cheaper(devices, num_tokens, more, layer, routing, weights):
    few, many = seconds(
        [num_tokens, num_tokens + more],
        layer,
        device=devices["h100_sxm"],
        weights=weights,
        routing=routing,
    )
    assert many >= few * (1 - 1e-9)


@given(num_tokens=token_counts, layer=layers, routing=routings, weights=formats)
def test_no_price_is_below_what_the_data_sheet_allows(devices, num_tokens, layer, routing, weights):
    device, fmt = devices["h100_sxm"], WEIGHT_FORMATS[weights]
    t = seconds(num_tokens, layer, device=device, weights=weights, routing=routing)
    peak = device.peak_flops_per_s[fmt.compute_dtype(device, "bf16")]
    assert t > moe_weight_bytes(num_tokens, layer, fmt, routing) / device.memory_bandwidth_bytes_per_s
    assert t > moe_flops(num_tokens, layer) / layer.ep_size / peak


@given(num_tokens=token_counts, layer=layers, routing=routings)
def test_more_bandwidth_is_never_slower(devices, num_tokens, layer, routing):
    h100 = devices["h100_sxm"]
    faster = replace(h100, memory_bandwidth_bytes_per_s=1.5 * h100.memory_bandwidth_bytes_per_s)
    assert seconds(num_tokens, layer, device=faster, routing=routing) < seconds(
        num_tokens, layer, device=h100, routing=routing
    )


@pytest.mark.parametrize("routing", [BALANCED, ZIPF], ids=lambda routing: routing.kind)
def test_array_equals_single_prices(devices, routing):
    settings = {"device": devices["b200_sxm"], "weights": "fp8_block", "routing": routing}
    counts = [1, 2, 7, 64, 65, 1000, 8192]
    together = seconds(counts, DEEPSEEK, **settings)
    assert together.tolist() == [float(seconds(n, DEEPSEEK, **settings)) for n in counts]


def test_weights_of_half_the_bytes_take_half_the_time_where_reading_is_all(devices):
    """fp8 on A100 is weight-only. 24 tokens, all experts: some 1.4 and 0.7 ms of reading."""
    curve = MoeCurve(compute_capability="sm80")
    full, half = (
        seconds(24, device=devices["a100_80gb_sxm"], weights=name, curve=curve) for name in ("bf16", "fp8")
    )
    assert half / full == pytest.approx(0.5, abs=0.06)


def test_marlin_chooses_tiles_for_the_tokens_of_all_ranks():
    """256 tokens, 8 of 384 experts each: 5.3 per expert; 2,048 assignments per 24 experts of a rank: 85."""
    layer = replace(DEEPSEEK, num_experts=384, top_k=8, ep_size=16)
    heights = (8, 16, 32, 48, 64)
    many = common_height(np.array([256.0 * 8]), layer, heights)
    alone = common_height(np.array([256.0 * 8]), replace(layer, ep_size=1), heights)
    assert (many, alone) == (64, 8)
    loads = rank_loads(256, layer, BALANCED)
    assert tiles_of(loads, many) == pytest.approx(24)  # one tile of 64 rows for 5.3 tokens
    # M topk / E / height < 0.9 keeps the height: 7.2 tokens per expert are the first to need 16 rows.
    tokens = np.array([7.19, 7.2, 57.5, 57.7, 1000]) * 24
    assert common_height(tokens, layer, heights).tolist() == [8, 16, 64, 64, 64]


def test_tokens_of_other_ranks_cost_their_masked_share(devices):
    """Expert parallelism on Triton still moves 0.8 of the activations of tokens that go elsewhere."""
    h100 = devices["h100_sxm"]
    layer = replace(MIXTRAL, ep_size=8)
    slow = MoeCurve(activation_bandwidth_share=0.22)
    assignments_here, assignments_elsewhere = 1000 * 2 / 8, 1000 * 2 * 7 / 8
    per_assignment = (2 * 4096 + 5 * 14336) * 2 / 3.35e12
    extra = (assignments_here + 0.8 * assignments_elsewhere) * per_assignment * (1 / 0.22 - 1 / 0.44)
    assert seconds(1000, layer, device=h100, curve=slow) - seconds(1000, layer, device=h100) == pytest.approx(
        extra
    )


def test_rejects_what_cannot_be(devices):
    with pytest.raises(ValueError, match="ep_size=3: must divide num_experts=8"):
        replace(MIXTRAL, ep_size=3)
    with pytest.raises(ValueError, match="top_k=9: must be at most num_experts=8"):
        replace(MIXTRAL, top_k=9)
    with pytest.raises(
        ValueError, match="kind=random: must be one of balanced, uniform, zipf, measured, power_law"
    ):
        Routing(kind="random")
    with pytest.raises(ValueError, match=r"must be set for zipf routing; 0.5"):
        Routing(kind="zipf")
    with pytest.raises(ValueError, match=r"exponent=-0.1: must be >= 0 and < 10"):
        Routing(kind="zipf", exponent=-0.1)
    with pytest.raises(ValueError, match="must be set for power_law"):
        Routing(kind="power_law")
    with pytest.raises(ValueError, match=r"exponent=1.2: must be null for balanced"):
        Routing(kind="balanced", exponent=1.2)
    with pytest.raises(ValueError, match="exponent=1: must be > 0, < 10 and not 1"):
        Routing(kind="power_law", exponent=1)
    with pytest.raises(ValueError, match="num_tokens=0: must be >= 1"):
        seconds([4, 0], device=devices["h100_sxm"])
    with pytest.raises(
        ValueError, match="kernels=deep_gemm: must be vllm, sglang, trtllm, marlin or deepgemm"
    ):
        seconds(1, device=devices["h100_sxm"], kernels="deep_gemm")
    with pytest.raises(ValueError, match=r"flops_share=1.5: must be a share"):
        MoeCurve(flops_share=1.5)
    with pytest.raises(
        ValueError, match="compute_capability=sm70: must be one of sm80, sm89, sm90, sm100, sm120"
    ):
        MoeCurve(compute_capability="sm70")
    with pytest.raises(
        ValueError, match="compute_capability=sm70: must be one of sm80, sm89, sm90, sm100, sm120"
    ):
        kernel_family(devices["h100_sxm"], MIXTRAL, WEIGHT_FORMATS["bf16"], compute_capability="sm70")
