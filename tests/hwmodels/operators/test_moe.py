"""Prices of routed experts against hand calculations and draws, and laws that any price obeys."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hwmodels.model.quantization import WEIGHT_FORMATS, WeightFormat
from hwmodels.operators.moe import (
    MoeCurve,
    common_height,
    moe_flops,
    moe_seconds,
    moe_weight_bytes,
    tiles_and_rows,
    tiles_of,
)
from hwmodels.operators.moe_kernels import FAMILIES, kernel_family
from hwmodels.operators.moe_routing import (
    ExpertLayer,
    Routing,
    expected_active_experts,
    rank_loads,
    zipf_chances,
)

MIXTRAL = ExpertLayer(hidden_size=4096, intermediate_size=14336, top_k=2, num_experts=8)
DEEPSEEK = ExpertLayer(hidden_size=7168, intermediate_size=2048, top_k=8, num_experts=256, ep_size=8)
BALANCED = Routing(kind="balanced")
UNIFORM = Routing(kind="uniform")
SKEWED = Routing(kind="power_law", exponent=1.2)
ZIPF = Routing(kind="zipf", exponent=0.5)
CAPABILITIES = {
    "a100_80gb_sxm": "sm80",
    "l4": "sm89",
    "h100_sxm": "sm90",
    "h200_sxm": "sm90",
    "b200_sxm": "sm100",
    "rtx_pro_6000_server": "sm120",
}

zipfs = [ZIPF, Routing(kind="zipf", exponent=0), Routing(kind="zipf", exponent=3)]
routings = st.sampled_from([BALANCED, UNIFORM, SKEWED, Routing(kind="power_law", exponent=1.01), *zipfs])
layers = st.sampled_from([MIXTRAL, DEEPSEEK, replace(DEEPSEEK, ep_size=1), replace(MIXTRAL, gated=False)])
formats = st.sampled_from(["bf16", "fp8", "fp8_block", "int4_wo", "mxfp4"])
token_counts = st.integers(1, 20_000)


def seconds(
    num_tokens, layer=MIXTRAL, *, device, weights="bf16", routing=BALANCED, curve=None, kernels="vllm"
):
    return moe_seconds(
        num_tokens,
        layer,
        WEIGHT_FORMATS[weights],
        device,
        curve or MoeCurve(),
        routing=routing,
        kernels=kernels,
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


def test_active_experts_match_closed_forms():
    assert expected_active_experts(4, MIXTRAL, UNIFORM) == pytest.approx(8 * (1 - 0.75**4))
    assert expected_active_experts([1, 3, 4, 100], MIXTRAL, BALANCED).tolist() == [2, 6, 8, 8]
    # a rank has 32 of 256 experts, and an eighth of the 8 that each token picks
    assert expected_active_experts([1, 4, 4096], DEEPSEEK, BALANCED).tolist() == [1, 4, 32]


def test_skew_touches_fewer_experts_than_chance():
    layer = replace(DEEPSEEK, ep_size=1)
    skewed, uniform, balanced = (
        float(expected_active_experts(32, layer, routing)) for routing in (SKEWED, UNIFORM, BALANCED)
    )
    assert skewed < uniform < balanced == 256


def test_chances_of_zipf_match_hand_calculation():
    """Weights 1, 1/2, 1/3: two picks would give the first 12 / 11. It gets 1, the others share the second."""
    assert zipf_chances(3, 2, 1.0) == pytest.approx([1, 3 / 5, 2 / 5])
    assert zipf_chances(3, 1, 1.0) == pytest.approx([6 / 11, 3 / 11, 2 / 11])
    assert zipf_chances(4, 4, 2.0).tolist() == [1, 1, 1, 1]


@given(num_experts=st.integers(1, 600), exponent=st.floats(0, 9), share=st.floats(0, 1))
def test_chances_of_zipf_are_a_tokens_picks(num_experts, exponent, share):
    top_k = 1 + int(share * (num_experts - 1))
    chances = zipf_chances(num_experts, top_k, exponent)
    assert chances.sum() == pytest.approx(top_k)
    assert (chances > 0).all()
    assert (chances <= 1 + 1e-12).all()
    assert (np.diff(chances) <= 1e-12).all()


def test_experts_of_zipf_match_hand_calculation():
    """Two tokens, chances 1, 3/5, 2/5: experts get 2, 1.2, 0.8; 1 + (1 - 0.4^2) + (1 - 0.6^2) are active."""
    layer = ExpertLayer(hidden_size=64, intermediate_size=64, top_k=2, num_experts=3)
    loads = rank_loads(2, layer, Routing(kind="zipf", exponent=1))
    assert (loads.num_experts * loads.tokens).tolist() == pytest.approx([2, 1.2, 0.8])
    assert loads.active_experts == pytest.approx(1 + 0.84 + 0.64)


@pytest.mark.parametrize("routing", [UNIFORM, Routing(kind="zipf", exponent=0)], ids=lambda r: r.kind)
def test_zipf_without_skew_is_uniform(routing):
    assert expected_active_experts(4, MIXTRAL, routing) == pytest.approx(8 * (1 - 0.75**4))
    counts = np.array([4, 40, 4096])
    loads = rank_loads(counts, DEEPSEEK, routing)
    assert loads.active_experts == pytest.approx(32 * (1 - (1 - 8 / 256) ** counts))
    assert loads.assignments == pytest.approx(counts)


@pytest.mark.parametrize("exponent", [0.25, 0.5, 1.0, 2.0])
def test_groups_of_like_experts_are_priced_as_experts_are(exponent):
    layer, counts = replace(DEEPSEEK, ep_size=1), np.arange(1, 5000, 7.0)
    chances = np.minimum(1, zipf_chances(256, 8, exponent))
    each = (1 - (1 - chances) ** counts[:, None]).sum(axis=1)
    grouped = expected_active_experts(counts, layer, Routing(kind="zipf", exponent=exponent))
    assert grouped == pytest.approx(each, rel=2e-3)


@given(num_tokens=token_counts, exponent=st.floats(0, 9), experts=st.sampled_from([8, 64, 256, 512]))
def test_zipf_never_keeps_more_experts_busy_than_uniform(num_tokens, exponent, experts):
    layer = ExpertLayer(hidden_size=64, intermediate_size=64, top_k=4, num_experts=experts)
    zipf = Routing(kind="zipf", exponent=exponent)
    active = expected_active_experts(num_tokens, layer, zipf)
    assert 4 * (1 - 1e-9) <= active <= expected_active_experts(num_tokens, layer, UNIFORM) * (1 + 1e-9)


def test_busiest_rank_of_zipf_has_the_most_popular_of_each_round():
    """Four experts, two ranks, top 2: chances 2 (12, 6, 4, 3) / 25; this one has the 1st and 3rd."""
    layer = ExpertLayer(hidden_size=64, intermediate_size=64, top_k=2, num_experts=4, ep_size=2)
    loads = rank_loads([1, 100], layer, Routing(kind="zipf", exponent=1))
    assert loads.assignments == pytest.approx([32 / 25, 3200 / 25])
    lone = replace(layer, num_experts=64, ep_size=64)
    assert expected_active_experts(1, lone, ZIPF) == pytest.approx(1)  # some rank has work


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


def test_draws_spread_the_tokens_of_an_expert():
    """100 tokens, each with a chance of 1/4 for this expert: binomial, sqrt(100 x 1/4 x 3/4)."""
    loads = rank_loads(100, MIXTRAL, UNIFORM)
    assert loads.tokens == pytest.approx(25)
    assert loads.spread == pytest.approx(4.330, abs=1e-3)
    assert rank_loads(1, MIXTRAL, UNIFORM).spread == pytest.approx(0)  # that has one, if any
    assert rank_loads(100, MIXTRAL, BALANCED).spread == 0


@pytest.mark.parametrize("num_tokens", [3, 40, 250, 400])
def test_tiles_and_rows_match_draws(num_tokens):
    """Binomial tokens of 8 experts, tiles of 64 rows and fewer; the window stands for the bell."""
    drawn = np.random.default_rng(0).binomial(num_tokens, 0.25, size=200_000)
    heights = np.select([drawn == 0, drawn <= 8, drawn <= 16, drawn <= 32], [0, 8, 16, 32], default=64)
    num_tiles = np.ceil(drawn / 64)
    tiles, rows = tiles_and_rows(rank_loads(num_tokens, MIXTRAL, UNIFORM), 64)
    assert tiles == pytest.approx(8 * num_tiles.mean(), rel=0.03)
    assert rows == pytest.approx(8 * (num_tiles * heights).mean(), rel=0.05)


def test_balanced_experts_fill_tiles_together():
    """Eight experts with 16 tokens, 16.25 and 65: 16 rows; a quarter of them 32; two tiles of 64 each."""
    tiles, rows = tiles_and_rows(rank_loads([64, 65, 260], MIXTRAL, BALANCED), 64)
    assert tiles.tolist() == pytest.approx([8, 8, 16])
    assert rows.tolist() == pytest.approx([8 * 16, 6 * 16 + 2 * 32, 16 * 64])


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


@given(num_tokens=token_counts, layer=layers, routing=routings)
def test_every_token_reaches_top_k_experts(num_tokens, layer, routing):
    loads = rank_loads(num_tokens, replace(layer, ep_size=1), routing)
    assert loads.assignments == pytest.approx(num_tokens * layer.top_k)
    assert loads.tokens.max() <= num_tokens * (1 + 1e-9)
    assert loads.active_experts <= layer.num_experts


def test_busiest_rank_matches_draws():
    """128 experts on 8 ranks, 512 tokens: mean over draws of the fullest rank; popularities as documented."""
    rng = np.random.default_rng(0)
    layer = ExpertLayer(hidden_size=64, intermediate_size=64, top_k=8, num_experts=128, ep_size=8)
    low, high = 1.0 ** (1 - 1.2), (0.8 * 512) ** (1 - 1.2)
    drawn = (low + (high - low) * rng.random((400, 128))) ** (1 / (1 - 1.2))
    tokens = 512 * 8 * drawn / drawn.sum(axis=1, keepdims=True)
    fullest = tokens.reshape(400, 8, 16).sum(axis=2).max(axis=1).mean()

    assert fullest > 1.3 * 512
    assert rank_loads(512, layer, SKEWED).assignments == pytest.approx(fullest, rel=0.1)


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


@pytest.mark.parametrize(
    ("device", "weights", "ep_size", "kernels", "family"),
    [
        ("a100_80gb_sxm", "bf16", 1, "vllm", "triton_bf16"),
        ("a100_80gb_sxm", "fp8", 1, "vllm", "marlin"),
        ("l4", "fp8", 1, "vllm", "triton_fp8"),
        ("l4", "nvfp4", 1, "vllm", "marlin"),
        ("l4", "fp8_block", 8, "trtllm", "cutlass_fp8_block"),
        ("h100_sxm", "fp8", 1, "vllm", "cutlass_fp8_hopper"),
        ("h100_sxm", "fp8", 1, "trtllm", "cutlass_fp8_block"),
        ("h100_sxm", "fp8_block", 1, "vllm", "triton_fp8"),
        ("h100_sxm", "fp8_block", 8, "vllm", "cutlass_fp8_block"),
        ("h100_sxm", "mxfp4", 1, "vllm", "triton_mxfp4"),
        ("h100_sxm", "nvfp4", 1, "vllm", "marlin_hopper"),
        ("h100_sxm", "mxfp4", 1, "marlin", "marlin_hopper"),
        ("h100_sxm", "bf16", 1, "marlin", "triton_bf16"),
        ("h200_sxm", "int4_wo", 1, "vllm", "marlin_hopper"),
        ("b200_sxm", "bf16", 1, "vllm", "trtllm_gen_bf16"),
        ("b200_sxm", "nvfp4", 8, "trtllm", "trtllm_gen_nvfp4"),
        ("b200_sxm", "int4_wo", 1, "vllm", "marlin_blackwell"),
        ("b200_sxm", "int8", 1, "vllm", "triton_fp8"),
        ("rtx_pro_6000_server", "nvfp4", 1, "vllm", "cutlass_nvfp4"),
        ("rtx_pro_6000_server", "mxfp4", 1, "vllm", "marlin"),
    ],
)
def test_kernel_family_is_what_the_engine_chooses(devices, device, weights, ep_size, kernels, family):
    layer = replace(MIXTRAL, ep_size=ep_size)
    capability = CAPABILITIES[device]
    chosen = kernel_family(
        devices[device], layer, WEIGHT_FORMATS[weights], kernels, compute_capability=capability
    )
    assert chosen == family


def test_every_format_has_a_family_on_every_device(devices):
    for device in devices.values():
        for weights in WEIGHT_FORMATS.values():
            for kernels in ("vllm", "trtllm"):
                for capability in set(CAPABILITIES.values()):
                    family = kernel_family(device, DEEPSEEK, weights, kernels, compute_capability=capability)
                    assert family in FAMILIES


@pytest.mark.parametrize("weights", ["bf16", "fp8", "nvfp4", "mxfp4", "int4_wo"])
def test_a_better_data_sheet_runs_the_same_kernels(devices, weights):
    """The chip tells the kernels, not its figures: a third of the bandwidth more is some time less."""
    device, curve = devices["rtx_pro_6000_server"], MoeCurve(compute_capability="sm120")
    better = replace(
        device,
        memory_bandwidth_bytes_per_s=4 / 3 * device.memory_bandwidth_bytes_per_s,
        peak_flops_per_s={dtype: 4 * peak for dtype, peak in device.peak_flops_per_s.items()},
    )
    slow, fast = (seconds(32, device=d, weights=weights, curve=curve) for d in (device, better))
    assert 0.7 * slow < fast < slow


def test_fp4_weights_with_fp8_activations_have_kernels_of_their_own(devices):
    w4a8 = WeightFormat(name="w4a8", bits=4, scale_bytes_per_weight=1 / 32, compute="fp8")
    b200, a100 = devices["b200_sxm"], devices["a100_80gb_sxm"]
    assert kernel_family(b200, DEEPSEEK, w4a8, compute_capability="sm100") == "trtllm_gen_w4a8"
    assert kernel_family(a100, DEEPSEEK, w4a8, compute_capability="sm80") == "marlin"


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
    with pytest.raises(ValueError, match="kernels=sglang: must be vllm, trtllm or marlin"):
        seconds(1, device=devices["h100_sxm"], kernels="sglang")
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
