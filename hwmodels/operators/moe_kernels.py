"""Families of kernels for routed experts: their differences, which are equal on every device."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hwmodels.devices.device import Device
from hwmodels.model.quantization import WeightFormat
from hwmodels.operators.moe_routing import ExpertLayer


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFamily:
    """Differences of one implementation from the others, equal on every device."""

    num_kernels: int
    """Kernels launched in sequence: routing, sort, quantisation, GEMMs, activation, combine."""
    flops_factor: float
    """Factor on a device's `flops_share`."""
    fill_depth: float
    """Rows of weights that a tile could read while it fills its pipeline; matters for shallow GEMMs."""
    remote_share: float
    """Share of the activation traffic of tokens for other ranks: kernels that mask them still move it."""
    max_tile_rows: int
    bandwidth_factor: float = 1.0
    """Factor on a device's `weight_bandwidth_share`."""
    tile_rows: tuple[int, ...] = ()
    """Rows of the tiles that a call chooses from, one height for all experts; empty: each expert its own.

    It takes the lowest that holds 1 / 0.9 of the tokens of all ranks per expert of this rank. So with expert
    parallelism tiles are higher than the experts' few tokens need (fused_marlin_moe of vLLM 0.24).
    """


_TRITON = KernelFamily(num_kernels=7, flops_factor=1.0, fill_depth=60, remote_share=0.8, max_tile_rows=64)
_CUTLASS = KernelFamily(num_kernels=7, flops_factor=0.60, fill_depth=30, remote_share=0.05, max_tile_rows=128)
_MARLIN = KernelFamily(
    num_kernels=8,
    flops_factor=1.13,
    fill_depth=40,
    remote_share=0.8,
    max_tile_rows=64,
    tile_rows=(8, 16, 32, 48, 64),
)
_TRTLLM = KernelFamily(num_kernels=3, flops_factor=0.87, fill_depth=26, remote_share=0.1, max_tile_rows=128)

FAMILIES = {
    "triton_bf16": _TRITON,
    # Never measured: its FLOP/s are those of the kernels that were.
    "triton_bf16_blackwell": replace(_TRITON, flops_factor=_TRTLLM.flops_factor),
    "triton_fp8": replace(_TRITON, num_kernels=8, flops_factor=0.53, fill_depth=110),
    # OpenAI's kernels for gpt-oss, which unpack weights on the way to the tensor cores.
    "triton_mxfp4": replace(
        _TRITON, num_kernels=8, flops_factor=0.85, bandwidth_factor=0.75, remote_share=0.1, max_tile_rows=128
    ),
    "cutlass_bf16": _CUTLASS,
    "cutlass_fp8": replace(_CUTLASS, flops_factor=0.53, fill_depth=45),
    # One scale per tensor, Hopper, vLLM 0.24: five times slower than the block-scaled kernel on equal shapes.
    "cutlass_fp8_hopper": replace(_CUTLASS, flops_factor=0.20, fill_depth=350, bandwidth_factor=0.20),
    "cutlass_fp8_block": replace(_CUTLASS, num_kernels=6, flops_factor=0.46, fill_depth=190),
    "cutlass_nvfp4": replace(_CUTLASS, num_kernels=8, flops_factor=1.05, fill_depth=330),
    # Marlin issues the mma of Ampere; later server chips run it at a part of their data sheet's peak.
    "marlin": _MARLIN,
    "marlin_hopper": replace(_MARLIN, flops_factor=0.535, fill_depth=173),
    "marlin_blackwell": replace(_MARLIN, flops_factor=0.284, fill_depth=261),
    "trtllm_gen_bf16": _TRTLLM,
    "trtllm_gen_fp8": replace(_TRTLLM, flops_factor=1.20, fill_depth=93),
    "trtllm_gen_fp8_block": replace(
        _TRTLLM, num_kernels=5, flops_factor=0.38, fill_depth=100, remote_share=0.6
    ),
    # Set on whole runs of TensorRT-LLM's prefill and decode workers, not on measurements of the operator.
    "deepgemm_fp8_block": replace(
        _TRTLLM, num_kernels=5, flops_factor=0.75, fill_depth=100, bandwidth_factor=0.6
    ),
    "trtllm_gen_nvfp4": replace(_TRTLLM, flops_factor=1.25, fill_depth=210),
    "trtllm_gen_mxfp4": replace(_TRTLLM, num_kernels=4, flops_factor=0.62, fill_depth=900, remote_share=0.2),
    "trtllm_gen_w4a8": replace(_TRTLLM, num_kernels=5, flops_factor=1.35, fill_depth=510),
}
"""Families by implementation and format, fitted once over all devices together with their free curves."""

MARLIN = {
    "sm80": "marlin",
    "sm89": "marlin",
    "sm90": "marlin_hopper",
    "sm100": "marlin_blackwell",
    "sm120": "marlin",
}
"""Marlin's family by compute capability."""


def check_capability(compute_capability: str) -> None:
    """Raises ValueError unless the kernels of chips with this capability are known."""
    if compute_capability not in MARLIN:
        raise ValueError(
            f"compute_capability={compute_capability}: must be one of {', '.join(MARLIN)}; "
            "choose that of the most similar device"
        )


def check_library(kernels: str) -> None:
    """Raises ValueError for an unknown library."""
    if kernels not in ("vllm", "sglang", "trtllm", "marlin", "deepgemm"):
        raise ValueError(f"kernels={kernels}: must be vllm, sglang, trtllm, marlin or deepgemm")


def kernel_family(
    device: Device,
    layer: ExpertLayer,
    weights: WeightFormat,
    kernels: str = "vllm",
    *,
    compute_capability: str,
) -> str:
    """Returns the name in `FAMILIES` of the kernels that an engine runs.

    vllm: the choices of vLLM 0.24, as measured. marlin: the same, but Marlin for weights of 4 and 8 bits.
    sglang: the same, but Triton for weights of 16 bits, and on Hopper for 8 bits on expert-parallel ranks
    (SGLang's moe-runner-backend auto, without DeepEP).
    trtllm: as vllm on Blackwell, and CUTLASS for vLLM's Triton and its slow fp8 kernel; this is assumed, not
    measured. Marlin unpacks the formats that tensor cores lack. deepgemm: TensorRT-LLM's choice for data
    parallel attention on Blackwell with weights in fp8 by block.
    The device only determines the formats of the tensor cores. sm89 runs Triton, as sm80 does.
    Raises ValueError for an unknown library or compute capability, and for deepgemm elsewhere.
    """
    check_library(kernels)
    check_capability(compute_capability)
    asked = asked_family(kernels, weights, compute_capability)
    if asked is not None:
        return asked
    blackwell, hopper = compute_capability == "sm100", compute_capability == "sm90"
    fp4 = "fp4" in device.peak_flops_per_s
    if weights.bits == 4 and weights.compute == "fp8" and blackwell:
        return "trtllm_gen_w4a8"
    if weights.name == "mxfp4" and (blackwell or hopper):
        return "trtllm_gen_mxfp4" if blackwell else "triton_mxfp4"
    if weights.compute == "fp4" and fp4:
        return "trtllm_gen_nvfp4" if blackwell else "cutlass_nvfp4"
    if weights.bits < 8 or weights.falls_back_on(device) or (weights.bits < 16 and weights.compute is None):
        return MARLIN[compute_capability]
    if weights.name == "int8":
        return "triton_fp8"
    kinds = {"fp8": "fp8", "fp8_block": "fp8_block", "mxfp8": "fp8_block"}
    return wide_family(kinds.get(weights.name, "bf16"), layer, kernels, compute_capability)


def wide_family(kind: str, layer: ExpertLayer, kernels: str, compute_capability: str) -> str:
    """Returns the family for weights in kind bf16, fp8 or fp8_block that tensor cores take as they are."""
    if compute_capability == "sm100":
        is_triton = kernels == "sglang" and kind == "bf16"
        return "triton_bf16_blackwell" if is_triton else f"trtllm_gen_{kind}"
    if kernels == "sglang" and (kind == "bf16" or compute_capability == "sm90"):
        return "triton_bf16" if kind == "bf16" else "triton_fp8"
    if compute_capability == "sm120":
        return f"cutlass_{kind}"
    hopper = compute_capability == "sm90"
    if kernels == "trtllm":
        return "cutlass_fp8_block" if hopper and kind == "fp8" else f"cutlass_{kind}"
    if kind == "bf16":
        return "triton_bf16"
    if hopper and kind == "fp8":
        return "cutlass_fp8_hopper"
    return "cutlass_fp8_block" if hopper and layer.ep_size > 1 else "triton_fp8"


def asked_family(kernels: str, weights: WeightFormat, compute_capability: str) -> str | None:
    """Returns the family of marlin or deepgemm; None: that of the library.

    Raises ValueError for deepgemm where its times are not known.
    """
    if kernels == "marlin" and weights.bits <= 8:
        return MARLIN[compute_capability]
    if kernels != "deepgemm":
        return None
    if compute_capability != "sm100" or weights.name not in ("fp8_block", "mxfp8"):
        raise ValueError(
            "moe_backend=deepgemm: only priced for experts in fp8 by block on sm100 (B200); "
            f"found {weights.name} on {compute_capability}; use auto"
        )
    return "deepgemm_fp8_block"
