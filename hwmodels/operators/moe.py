"""Mixture of experts: seconds of the routed experts of one layer on one expert-parallel rank.

A token visits top_k of num_experts experts. One rank permutes its tokens, runs two grouped GEMMs (up, with
the gate if there is one; down) and the activation between them, and combines the results:

    t = n kernel_s + sum over the two GEMMs of sqrt(stream^2 + compute^2) + permute

    n        kernels launched one after the other
    stream   weight bytes of the experts that receive tokens / bandwidth reached
    compute  FLOPs of the rows that tiles compute, padding included / FLOP/s reached
    permute  activation bytes written and read between the kernels / bandwidth reached

The time depends on the number of tokens that each expert receives: `rank_loads`. All values are expectations;
nothing is drawn at random. Reading weights and multiplying overlap only in part, hence the root of squares.

The model is fitted to and validated by vLLM's kernels on five GPUs: `hwmodels.fitting.moe`. For a given layer
and device the price depends only on a whole number of tokens, so a simulator can keep it in a table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hwmodels.checks import check_curve
from hwmodels.devices.device import DTYPE_BYTES, Device
from hwmodels.exact import smaller
from hwmodels.model.quantization import WeightFormat
from hwmodels.operators.moe_kernels import FAMILIES, MARLIN, kernel_family
from hwmodels.operators.moe_routing import (
    ExpertLayer,
    RankLoads,
    Routing,
    expected_active_experts,
    rank_loads,
)

Floats = NDArray[np.float64]

TILE_COLUMNS = 128
"""Output columns of one tile of a grouped GEMM, as usual for all kernels here."""

MIN_TILE_ROWS = 8
"""Tokens of the smallest tile (the n of an mma instruction with operands swapped)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeCurve:
    """Performance of grouped GEMMs on one device; defaults: medians, A100 to RTX PRO 6000."""

    compute_capability: str = "sm90"
    """Compute capability, which decides the kernels: sm80, sm89, sm90, sm100, or sm120."""
    kernel_s: float = 5.3e-6
    """Seconds from the start of one kernel of the layer to the start of the next if both do no work."""
    weight_bandwidth_share: float = 0.95
    """Share of the data sheet's memory bandwidth when reading expert weights with tiles on enough SMs."""
    flops_share: float = 0.70
    """Share of the dense peak in full tiles of 128 rows; a family's `flops_factor` multiplies it."""
    activation_bandwidth_share: float = 0.44
    """Share of memory bandwidth when moving activations: permutation, activation function, combine."""
    saturating_tiles_per_sm: float = 0.02
    """Tiles per SM from which on the memory bandwidth is reached; 0.25 on RTX PRO 6000, with GDDR7."""
    tile_fill_rows: float = 12.0
    """Rows that a tile could compute in the time that it takes to start and end."""

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
    """Returns the expected bytes of weights that the busiest rank reads, those of its active experts.

    Mixtral-8x7B in bf16, one token: 2 x 3 x 4,096 x 14,336 x 2 bytes = 705e6.
    """
    active = expected_active_experts(num_tokens, layer, routing)
    return active * layer.expert_weights * weights.bytes_per_weight


class MoeWork(NamedTuple):
    """Work of one call in figures of the data sheet; `work_seconds` applies a curve to it.

    Shapes are [...]; fields with [2, ...] hold the up and gate projection, then the down projection.
    """

    num_kernels: Floats
    stream_s: Floats
    """Seconds of reading weights at full bandwidth, shape [2, ...]."""
    tiles_per_sm: Floats
    """Tiles per SM, shape [2, ...]."""
    padded_s: Floats
    """Seconds of the rows of tiles at the family's factor of the peak, shape [2, ...]."""
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
    """Returns the part of `moe_seconds` that no fitted figure changes."""
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
    # per assignment: both GEMMs write, activation and combine read, the activation writes
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
    """Returns the height of all tiles of a call, for assignments of a token to an expert on all ranks."""
    per_expert = assignments / layer.num_rank_experts
    index = np.searchsorted(0.9 * np.array(heights), per_expert, side="right")
    return np.array(heights, dtype=np.float64)[np.minimum(index, len(heights) - 1)]


def tiles_of(loads: RankLoads, height: Floats) -> Floats:
    """Returns the tiles of all experts of the rank, each `height` rows high."""
    return mean_over_tokens(loads, lambda u: tiles_up_to(u, height[..., None]))


def tiles_and_rows(loads: RankLoads, max_tile_rows: int) -> tuple[Floats, Floats]:
    """Returns the tiles of all experts of the rank, and their rows.

    Tiles are as high as the largest, or the next power of two above an expert's few tokens.
    """

    def rows_up_to(u: Floats) -> Floats:
        rows = max_tile_rows * tiles_up_to(u, max_tile_rows)
        height = max_tile_rows // 2
        while height >= MIN_TILE_ROWS:  # each sufficient height saves as many rows
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
    # flops_share is that of a full tile of 128 rows, its own start included
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

    num_tokens: tokens that enter the layer on all expert-parallel ranks together, >= 1. With attention data
    parallelism that is the sum over its ranks. layer.intermediate_size is already divided by the tensor
    parallelism of the experts. Router GEMM, shared experts, all-to-all and all-reduce are not included.
    dtype: of the activations. kernels: vllm or trtllm, see `kernel_family`.

    H100, Mixtral-8x7B in bf16, balanced, 1 token, default curve: 2 experts of 352 MB at 0.95 of 3.35 TB/s are
    221 us (224 with the filling of pipelines), two tiles of 8 rows hide in it, 7 kernels of 5.3 us: 262 us.
    Raises ValueError for fewer tokens than 1, an unknown library or compute capability.
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
