"""Mixture of experts: seconds of the routed experts of one layer on one expert-parallel rank.

A token is routed to top_k of num_experts experts. One rank permutes its tokens, runs two grouped GEMMs (up,
with the gate if there is one; down) and the activation between them, and combines the results:

    t = n kernel_s + sum over the two GEMMs of sqrt(stream^2 + compute^2) + permute

    n        kernels launched one after the other
    stream   weight bytes of the experts that receive tokens / bandwidth reached
    compute  FLOPs of the rows that tiles compute, padding included / FLOP/s reached
    permute  activation bytes written and read between the kernels / bandwidth reached

The time depends on the number of tokens that each expert receives: `rank_loads`. All values are expectations;
nothing is drawn at random. Reading weights and multiplying overlap only in part, hence the root of the sum of
squares. The model is fitted to and validated with vLLM's kernels on five GPUs: `hwmodels.fitting.moe`. For a
given layer and device the price depends only on an integer number of tokens, so a simulator can tabulate it.
Kernel families for routed experts (`KernelFamily`) hold the differences between kernels, which are equal on
every device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hwmodels.checks import check_curve
from hwmodels.device import DTYPE_BYTES, Device
from hwmodels.exact import smaller
from hwmodels.model.weights import WeightFormat
from hwmodels.operators.moe_routing import (
    ExpertLayer,
    RankLoads,
    Routing,
    expected_active_experts,
    rank_loads,
)

Floats = NDArray[np.float64]

TILE_COLUMNS = 128
"""Output columns of one tile of a grouped GEMM, the usual value for all kernels here."""

MIN_TILE_ROWS = 8
"""Tokens of the smallest tile (the n of an mma instruction with operands swapped)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeCurve:
    """Performance of grouped GEMMs on one device; defaults: medians, A100 to RTX PRO 6000."""

    compute_capability: str = "sm90"
    """Compute capability, which decides the kernels: sm80, sm89, sm90, sm100, or sm120."""
    kernel_s: float = 5.3e-6
    """Seconds from the start of one kernel of the layer to the start of the next, without any work."""
    weight_bandwidth_share: float = 0.95
    """Share of the data-sheet memory bandwidth reached when reading expert weights with tiles on enough SMs.
    """
    flops_share: float = 0.70
    """Share of the dense peak in full tiles of 128 rows; a family's `flops_factor` multiplies it."""
    activation_bandwidth_share: float = 0.44
    """Share of memory bandwidth when moving activations: permutation, activation function, combine."""
    saturating_tiles_per_sm: float = 0.02
    """Tiles per SM needed to reach the memory bandwidth; 0.25 on RTX PRO 6000, with GDDR7."""
    tile_fill_rows: float = 12.0
    """Number of rows that a tile could compute in its start and end time."""

    def __post_init__(self) -> None:
        check_curve(self, capabilities=MARLIN, zero_allowed="tile_fill_rows")


def moe_flops(num_tokens: ArrayLike, layer: ExpertLayer) -> Floats:
    """Returns the FLOPs on all EP ranks: 2 m k w for m tokens, k experts each, w weights per expert.

    w is 3 hidden intermediate if gated. Mixtral-8x7B, one token: 2 x 2 x 3 x 4,096 x 14,336 = 705e6.
    """
    return 2.0 * np.asarray(num_tokens, dtype=np.float64) * layer.top_k * layer.expert_weights


def moe_weight_bytes(
    num_tokens: ArrayLike, layer: ExpertLayer, weights: WeightFormat, routing: Routing
) -> Floats:
    """Returns the expected bytes of weights of active experts that the busiest rank reads.

    Mixtral-8x7B in bf16, one token: 2 x 3 x 4,096 x 14,336 x 2 bytes = 705e6.
    """
    active = expected_active_experts(num_tokens, layer, routing)
    return active * layer.expert_weights * weights.bytes_per_weight


class MoeWork(NamedTuple):
    """Work of one call in data-sheet terms; `work_seconds` applies a curve to it.

    Shapes are [...]; fields with [2, ...] hold the up and gate projection, then the down projection.
    """

    num_kernels: Floats
    stream_s: Floats
    """Seconds of reading weights at full bandwidth, shape [2, ...]."""
    tiles_per_sm: Floats
    """Tiles per SM, shape [2, ...]."""
    padded_s: Floats
    """Seconds of the tiles' rows at the peak times the family's factor, shape [2, ...]."""
    fill_row_s: Floats
    """Seconds per row of `tile_fill_rows`, shape [2, ...]."""
    permute_s: Floats
    """Seconds of moving activations at full bandwidth."""


def moe_work(
    num_tokens: ArrayLike,
    layer: ExpertLayer,
    weights: WeightFormat,
    device: Device,
    *,
    dtype: str = "bf16",
    kernels: str = "vllm",
    routing: Routing,
    compute_capability: str,
) -> MoeWork:
    """Returns the part of `moe_seconds` that is independent of fitted parameters."""
    m = np.asarray(num_tokens, dtype=np.float64)
    if m.size and not (m >= 1).all():
        raise ValueError(f"num_tokens={m.min():g}: must be >= 1; omit the layer if no token enters it")
    family = FAMILIES[kernel_family(device, layer, weights, kernels, compute_capability=compute_capability)]
    loads = rank_loads(m, layer, routing)
    hidden, inter, in_up = layer.hidden_size, layer.intermediate_size, layer.num_matrices - 1
    # per GEMM: [weights per expert, reduction depth, output columns]
    size, depth, columns = np.array(
        [[in_up * hidden * inter, hidden * inter], [hidden, inter], [in_up * inter, hidden]], dtype=np.float64
    ).reshape(3, 2, *(1,) * m.ndim)
    if family.tile_rows:
        height = common_height(m * layer.top_k, layer, family.tile_rows)
        tiles = tiles_of(loads, height)
        rows = tiles * height
    else:
        tiles, rows = tiles_and_rows(loads, family.max_tile_rows)

    deeper = size * (1 + family.fill_depth / depth)
    peak = device.peak_flops_per_s[weights.compute_dtype(device, dtype)] * family.flops_factor
    bandwidth = device.memory_bandwidth_bytes_per_s
    remote = np.maximum(0.0, m * layer.top_k - loads.assignments)
    # per assignment: both GEMMs write; activation and combine read; the activation writes
    elements = 2 * hidden + (2 * in_up + 1) * inter
    moved = (loads.assignments + family.remote_share * remote) * elements * DTYPE_BYTES[dtype]
    return MoeWork(
        num_kernels=np.full_like(m, family.num_kernels),
        stream_s=loads.active_experts
        * deeper
        * (weights.bytes_per_weight / (bandwidth * family.bandwidth_factor)),
        tiles_per_sm=tiles * columns / (TILE_COLUMNS * device.num_sms),
        padded_s=rows * deeper * (2 / peak),
        fill_row_s=tiles * deeper * (2 / peak),
        permute_s=moved / bandwidth,
    )


def common_height(assignments: Floats, layer: ExpertLayer, heights: tuple[int, ...]) -> Floats:
    """Returns the height of all tiles of a call, from the token-expert assignments on all ranks."""
    per_expert = assignments / layer.num_rank_experts
    index = np.searchsorted(0.9 * np.array(heights), per_expert, side="right")
    return np.array(heights, dtype=np.float64)[np.minimum(index, len(heights) - 1)]


def tiles_of(loads: RankLoads, height: Floats) -> Floats:
    """Returns the tiles of all experts of the rank, each `height` rows high."""
    return mean_over_tokens(loads, lambda u: tiles_up_to(u, height[..., None]))


def tiles_and_rows(loads: RankLoads, max_tile_rows: int) -> tuple[Floats, Floats]:
    """Returns the tiles of all experts of the rank, and their rows.

    Tiles have the largest height, or the next power of two above an expert's few tokens.
    """

    def rows_up_to(u: Floats) -> Floats:
        rows = max_tile_rows * tiles_up_to(u, max_tile_rows)
        height = max_tile_rows // 2
        while height >= MIN_TILE_ROWS:  # each sufficient height saves this many rows
            rows = rows - height * np.minimum(u, height)
            height //= 2
        return np.asarray(rows)

    tiles = mean_over_tokens(loads, lambda u: tiles_up_to(u, max_tile_rows))
    return tiles, mean_over_tokens(loads, rows_up_to)


def tiles_up_to(u: Floats, height: Floats | int) -> Floats:
    """Returns the integral of the tiles of an expert over 0 to u tokens."""
    full = np.floor(u / height)
    return np.asarray((full + 1) * (u - height * full / 2))


def mean_over_tokens(loads: RankLoads, up_to: Callable[[Floats], Floats]) -> Floats:
    """Returns the mean of a function of an expert's tokens, from its integral, summed over the experts.

    An expert holds a whole number of tokens: u rounded up, where u is uniform in a window. The window is as
    wide as the loads' spread requires, and at least 1, for expectations between whole numbers: experts fill
    tiles one by one.
    """
    width = np.minimum(np.sqrt(1 + 12 * loads.spread**2), np.maximum(1.0, 2 * loads.tokens - 1))
    high = loads.tokens - 0.5 + width / 2
    low = np.maximum(0.0, high - width)  # without tokens there is no tile
    return np.asarray((loads.num_experts * (up_to(high) - up_to(low)) / width).sum(axis=-1))


def work_seconds(work: MoeWork, curve: MoeCurve) -> Floats:
    """Returns seconds of the work on a device that the curve describes."""
    spread = smaller(1.0, work.tiles_per_sm / curve.saturating_tiles_per_sm)
    stream = work.stream_s / (curve.weight_bandwidth_share * spread)
    # flops_share holds for a full tile of 128 rows, including its start
    share = curve.flops_share * (1 + curve.tile_fill_rows / 128)
    compute = (work.padded_s + curve.tile_fill_rows * work.fill_row_s) / share
    gemms = np.sqrt(stream * stream + compute * compute).sum(axis=0)
    permute = work.permute_s / curve.activation_bandwidth_share
    return np.asarray(work.num_kernels * curve.kernel_s + gemms + permute)


def moe_seconds(
    num_tokens: ArrayLike,
    layer: ExpertLayer,
    weights: WeightFormat,
    device: Device,
    curve: MoeCurve,
    *,
    dtype: str = "bf16",
    kernels: str = "vllm",
    routing: Routing,
) -> Floats:
    """Returns seconds of the routed experts of one layer on the busiest rank, per element of num_tokens.

    num_tokens: tokens that enter the layer on all expert-parallel ranks in total, >= 1. With attention data
    parallelism, the sum over its ranks. layer.intermediate_size is already divided by the tensor parallelism
    of the experts. Router GEMM, shared experts, all-to-all and all-reduce are not included. dtype: of the
    activations. kernels: vllm or trtllm, see `kernel_family`.

    H100, Mixtral-8x7B in bf16, balanced, 1 token, default curve: 2 experts of 352 MB at 0.95 of 3.35 TB/s are
    221 us (224 us including pipeline fill), which hides two tiles of 8 rows. With 7 kernels of 5.3 us: 262
    us. Raises ValueError for fewer tokens than 1, an unknown library or compute capability.
    """
    work = moe_work(
        num_tokens,
        layer,
        weights,
        device,
        dtype=dtype,
        kernels=kernels,
        routing=routing,
        compute_capability=curve.compute_capability,
    )
    return work_seconds(work, curve)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFamily:
    """Differences of one implementation from the others, equal on every device."""

    num_kernels: int
    """Kernels launched in sequence: routing, sort, quantisation, GEMMs, activation, combine."""
    flops_factor: float
    """Factor on a device's `flops_share`."""
    fill_depth: float
    """Number of weight rows that a tile could read while it fills its pipeline; matters for shallow GEMMs."""
    remote_share: float
    """Share of the activation traffic of other ranks' tokens: kernels that mask these tokens still move it.
    """
    max_tile_rows: int
    bandwidth_factor: float = 1.0
    """Factor on a device's `weight_bandwidth_share`."""
    tile_rows: tuple[int, ...] = ()
    """Tile heights from which a call chooses one for all experts; empty: one height per expert. The call
    takes the lowest height that holds 1 / 0.9 of the tokens of all ranks per expert of this rank. With expert
    parallelism, tiles are therefore higher than the experts' few tokens need (fused_marlin_moe of vLLM 0.24).
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
    # Never measured: its FLOP/s are those of the measured kernels.
    "triton_bf16_blackwell": replace(_TRITON, flops_factor=_TRTLLM.flops_factor),
    "triton_fp8": replace(_TRITON, num_kernels=8, flops_factor=0.53, fill_depth=110),
    # OpenAI's kernels for gpt-oss, which unpack weights before the tensor cores.
    "triton_mxfp4": replace(
        _TRITON, num_kernels=8, flops_factor=0.85, bandwidth_factor=0.75, remote_share=0.1, max_tile_rows=128
    ),
    "cutlass_bf16": _CUTLASS,
    "cutlass_fp8": replace(_CUTLASS, flops_factor=0.53, fill_depth=45),
    # One scale per tensor, Hopper, vLLM 0.24: five times slower than the block-scaled kernel on equal shapes.
    "cutlass_fp8_hopper": replace(_CUTLASS, flops_factor=0.20, fill_depth=350, bandwidth_factor=0.20),
    "cutlass_fp8_block": replace(_CUTLASS, num_kernels=6, flops_factor=0.46, fill_depth=190),
    "cutlass_nvfp4": replace(_CUTLASS, num_kernels=8, flops_factor=1.05, fill_depth=330),
    # Marlin issues Ampere's mma; later server chips run it at a fraction of their data-sheet peak.
    "marlin": _MARLIN,
    "marlin_hopper": replace(_MARLIN, flops_factor=0.535, fill_depth=173),
    "marlin_blackwell": replace(_MARLIN, flops_factor=0.284, fill_depth=261),
    "trtllm_gen_bf16": _TRTLLM,
    "trtllm_gen_fp8": replace(_TRTLLM, flops_factor=1.20, fill_depth=93),
    "trtllm_gen_fp8_block": replace(
        _TRTLLM, num_kernels=5, flops_factor=0.38, fill_depth=100, remote_share=0.6
    ),
    # Fitted to whole runs of TensorRT-LLM's prefill and decode workers, not to operator measurements.
    "deepgemm_fp8_block": replace(
        _TRTLLM, num_kernels=5, flops_factor=0.75, fill_depth=100, bandwidth_factor=0.6
    ),
    "trtllm_gen_nvfp4": replace(_TRTLLM, flops_factor=1.25, fill_depth=210),
    "trtllm_gen_mxfp4": replace(_TRTLLM, num_kernels=4, flops_factor=0.62, fill_depth=900, remote_share=0.2),
    "trtllm_gen_w4a8": replace(_TRTLLM, num_kernels=5, flops_factor=1.35, fill_depth=510),
}
"""Families by implementation and format, fitted once over all devices, jointly with their free curves."""

MARLIN = {
    "sm80": "marlin",
    "sm89": "marlin",
    "sm90": "marlin_hopper",
    "sm100": "marlin_blackwell",
    "sm120": "marlin",
}
"""Marlin's family by compute capability."""


def check_capability(compute_capability: str) -> None:
    """Raises ValueError for a compute capability with unknown kernels."""
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
    parallel attention on Blackwell with block-scaled fp8 weights.
    The device only determines the formats of the tensor cores. sm89 runs Triton, like sm80. Raises ValueError
    for an unknown library or compute capability, and for deepgemm elsewhere.
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
    """Returns the family for weights in bf16, fp8 or fp8_block that tensor cores use unchanged."""
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
    """Returns the family of marlin or deepgemm; None: the library's family.

    Raises ValueError for deepgemm on chips without known times.
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
