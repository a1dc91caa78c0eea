"""Families of kernels for experts: which one runs for a format on a device."""

from dataclasses import replace

import pytest

from hwmodels.model.weights import WEIGHT_FORMATS, WeightFormat
from hwmodels.operators.moe import FAMILIES, MoeCurve, kernel_family
from tests.hwmodels.operators.moe_layers import DEEPSEEK, MIXTRAL, seconds

CAPABILITIES = {
    "a100_80gb_sxm": "sm80",
    "l4": "sm89",
    "h100_sxm": "sm90",
    "h200_sxm": "sm90",
    "b200_sxm": "sm100",
    "rtx_pro_6000_server": "sm120",
}


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
        ("b200_sxm", "fp8_block", 8, "trtllm", "trtllm_gen_fp8_block"),
        ("b200_sxm", "fp8_block", 8, "deepgemm", "deepgemm_fp8_block"),
        ("h100_sxm", "fp8_block", 8, "sglang", "triton_fp8"),
        ("h100_sxm", "mxfp4", 1, "sglang", "triton_mxfp4"),
        ("b200_sxm", "bf16", 1, "sglang", "triton_bf16_blackwell"),
        ("b200_sxm", "fp8_block", 8, "sglang", "trtllm_gen_fp8_block"),
        ("rtx_pro_6000_server", "bf16", 1, "sglang", "triton_bf16"),
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


@pytest.mark.parametrize(("device", "weights"), [("h100_sxm", "fp8_block"), ("b200_sxm", "nvfp4")])
def test_deepgemm_is_refused_where_nothing_shows_its_times(devices, device, weights):
    with pytest.raises(ValueError, match=f"moe_backend=deepgemm: only priced .* found {weights} on sm"):
        kernel_family(
            devices[device],
            DEEPSEEK,
            WEIGHT_FORMATS[weights],
            "deepgemm",
            compute_capability=CAPABILITIES[device],
        )


def test_deepgemm_is_faster_with_many_rows_and_slower_with_few(devices):
    """Twice the FLOP/s of the other kernel in large tiles, six tenths of its bandwidth."""
    own, other = FAMILIES["deepgemm_fp8_block"], FAMILIES["trtllm_gen_fp8_block"]
    assert own.flops_factor / other.flops_factor == pytest.approx(0.75 / 0.38)
    given = {"device": devices["b200_sxm"], "weights": "fp8_block"}
    given["curve"] = MoeCurve(compute_capability="sm100")
    many, few = (
        seconds(n, kernels="deepgemm", **given) / seconds(n, kernels="trtllm", **given) for n in (65_536, 64)
    )
    assert many < 0.7
    assert 1.2 < few < 1 / 0.6


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
