"""Mixture of experts: seconds of the routed experts of one layer on one expert-parallel rank.

A token visits top_k of num_experts experts. One rank permutes its tokens, runs two grouped GEMMs (up, with
the gate beside it where there is one; down) and the activation between them, and combines the results:

    t = n kernel_s + sum over the two GEMMs of sqrt(stream^2 + compute^2) + permute

    n        kernels launched one after the other
    stream   weight bytes of the experts that receive tokens / bandwidth reached
    compute  FLOPs of the rows that tiles compute, padding included / FLOP/s reached
    permute  activation bytes written and read between the kernels / bandwidth reached

Which experts receive how many tokens makes the price: `rank_loads`. All is expectation, nothing is drawn.
Reading weights and multiplying overlap only in part, hence the root of squares.

Fitted to and judged by vLLM's kernels on five GPUs: `hwmodels.fitting.moe`. Once layer and device are fixed
the price depends on a whole number of tokens alone, so a simulator can keep it in a table. Routing, kernels
and price share one module because none of them means anything without the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hwmodels.checks import check_finite, check_whole
from hwmodels.device import DTYPE_BYTES, Device
from hwmodels.exact import smaller
from hwmodels.quantization import WeightFormat

Floats = NDArray[np.float64]

TILE_COLUMNS = 128
"""Output columns of one tile of a grouped GEMM; usual for all kernels here."""

MIN_TILE_ROWS = 8
"""Tokens of the smallest tile (the n of an mma instruction with operands swapped)."""

ROUTINGS = ("balanced", "uniform", "power_law")


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How the router spreads tokens over experts.

    balanced: as evenly as whole tokens allow. uniform: each token picks top_k experts at random.
    power_law: the popularity x of an expert has density x^-exponent on [1, 0.8 num_tokens], on [0.01, 2]
    while there are no more assignments than experts. It is the skew that NVIDIA's aiconfigurator measures
    with: 1.01 as seen in DeepSeek-R1, 1.2 as in Qwen3-235B.
    """

    kind: str = "balanced"
    exponent: float | None = None

    def __post_init__(self) -> None:
        if self.kind not in ROUTINGS:
            raise ValueError(f"kind={self.kind}: must be one of {', '.join(ROUTINGS)}")
        if self.kind != "power_law" and self.exponent is not None:
            raise ValueError(f"exponent={self.exponent}: {self.kind} routing has none; leave it null")
        if self.kind == "power_law" and self.exponent is None:
            raise ValueError("exponent=None: power_law routing needs one; 1.2 is usual")
        if self.exponent is not None and not (0 < self.exponent < 10 and self.exponent != 1):
            raise ValueError(f"exponent={self.exponent}: must be > 0, < 10 and not 1; use 1.01 for 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertLayer:
    """Routed experts of one layer, as one rank sees them."""

    hidden_size: int
    intermediate_size: int
    """Of one expert on one rank: the model's, divided by the tensor parallelism of the experts."""
    top_k: int
    num_experts: int
    """Routed experts on all ranks together."""
    ep_size: int = 1
    """Expert-parallel ranks; each holds num_experts / ep_size whole experts."""
    gated: bool = True
    """Gate and up projection (SwiGLU), else up alone."""

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "top_k", "num_experts", "ep_size"):
            check_whole(name, getattr(self, name))
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k={self.top_k}: must be at most num_experts={self.num_experts}")
        if self.num_experts % self.ep_size:
            raise ValueError(f"ep_size={self.ep_size}: must divide num_experts={self.num_experts}")

    @property
    def num_rank_experts(self) -> int:
        return self.num_experts // self.ep_size

    @property
    def num_matrices(self) -> int:
        """Of hidden_size x intermediate_size weights each, in one expert."""
        return 3 if self.gated else 2

    @property
    def expert_weights(self) -> int:
        """Weights of one expert on one rank."""
        return self.num_matrices * self.hidden_size * self.intermediate_size


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeCurve:
    """What grouped GEMMs reach on one device. Defaults: medians over A100, H100, H200, B200, RTX PRO 6000."""

    kernel_s: float = 5.3e-6
    """From the start of one kernel of the layer to that of the next when both do nothing, in seconds."""
    weight_bandwidth_share: float = 0.95
    """Of the data sheet's memory bandwidth, reading expert weights with tiles on enough SMs."""
    flops_share: float = 0.70
    """Of the dense peak, in full tiles of 128 rows; a family's `flops_factor` multiplies it."""
    activation_bandwidth_share: float = 0.44
    """Of memory bandwidth, moving activations between kernels: permutation, activation function, combine."""
    saturating_tiles_per_sm: float = 0.02
    """Tiles for each SM from which on the memory bandwidth is reached; 0.25 on RTX PRO 6000, with GDDR7."""
    tile_fill_rows: float = 12.0
    """Rows that a tile could compute in the time in which it starts and ends."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            check_finite(entry.name, getattr(self, entry.name), zero_allowed=entry.name == "tile_fill_rows")
            if entry.name.endswith("_share") and getattr(self, entry.name) > 1:
                raise ValueError(f"{entry.name}={getattr(self, entry.name)}: must be a share, > 0 and <= 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelFamily:
    """What one implementation does differently, on every device alike."""

    num_kernels: int
    """Launched one after the other: routing, sort, quantisation, GEMMs, activation, combine."""
    flops_factor: float
    """Times a device's `flops_share`."""
    fill_depth: float
    """Rows of weights that a tile could read while it fills its pipeline; felt where a GEMM is not deep."""
    remote_share: float
    """Of the activation traffic of a token that goes to another rank: kernels that mask it still move it."""
    max_tile_rows: int
    bandwidth_factor: float = 1.0
    """Times a device's `weight_bandwidth_share`."""


_TRITON = KernelFamily(num_kernels=7, flops_factor=1.0, fill_depth=60, remote_share=0.8, max_tile_rows=64)
_CUTLASS = KernelFamily(num_kernels=7, flops_factor=0.60, fill_depth=30, remote_share=0.05, max_tile_rows=128)
_MARLIN = KernelFamily(num_kernels=8, flops_factor=1.10, fill_depth=25, remote_share=0.8, max_tile_rows=64)
_TRTLLM = KernelFamily(num_kernels=4, flops_factor=0.87, fill_depth=26, remote_share=0.1, max_tile_rows=128)

FAMILIES = {
    "triton_bf16": _TRITON,
    "triton_fp8": replace(_TRITON, num_kernels=8, flops_factor=0.53, fill_depth=110),
    # OpenAI's kernels for gpt-oss; weights are unpacked on the way to the tensor cores
    "triton_mxfp4": replace(
        _TRITON, num_kernels=8, flops_factor=0.85, bandwidth_factor=0.75, remote_share=0.1, max_tile_rows=128
    ),
    "cutlass_bf16": _CUTLASS,
    "cutlass_fp8": replace(_CUTLASS, flops_factor=0.53, fill_depth=45),
    # one scale a tensor, Hopper, vLLM 0.24: five times slower than the block-scaled kernel on the same shapes
    "cutlass_fp8_hopper": replace(_CUTLASS, flops_factor=0.20, fill_depth=350, bandwidth_factor=0.20),
    "cutlass_fp8_block": replace(_CUTLASS, num_kernels=6, flops_factor=0.46, fill_depth=190),
    "cutlass_nvfp4": replace(_CUTLASS, num_kernels=8, flops_factor=1.05, fill_depth=330),
    # Marlin issues the mma of Ampere; servers' later chips run it at a part of their data sheet's peak
    "marlin": _MARLIN,
    "marlin_hopper": replace(_MARLIN, flops_factor=0.45, fill_depth=145),
    "marlin_blackwell": replace(_MARLIN, flops_factor=0.23, fill_depth=205),
    "trtllm_gen_bf16": _TRTLLM,
    "trtllm_gen_fp8": replace(_TRTLLM, flops_factor=1.20, fill_depth=93),
    "trtllm_gen_fp8_block": replace(
        _TRTLLM, num_kernels=5, flops_factor=0.38, fill_depth=100, remote_share=0.6
    ),
    "trtllm_gen_nvfp4": replace(_TRTLLM, flops_factor=1.25, fill_depth=210),
    "trtllm_gen_mxfp4": replace(_TRTLLM, flops_factor=0.62, fill_depth=900, remote_share=0.2),
    "trtllm_gen_w4a8": replace(_TRTLLM, num_kernels=5, flops_factor=1.35, fill_depth=510),
}
"""By implementation and format. Fitted once over all devices together, their curves free beside them."""

HBM_BYTES_PER_S = 1.9e12
"""Chips with the tensor cores of servers (sm_80, sm_90, sm_100) have more memory bandwidth than this."""


def kernel_family(device: Device, layer: ExpertLayer, weights: WeightFormat, kernels: str = "vllm") -> str:
    """The name in `FAMILIES` of what an engine runs there.

    vllm: the choices of vLLM 0.24, as measured. trtllm: the same on Blackwell, CUTLASS where vLLM runs Triton
    or its slow fp8 kernel; assumed, not measured. Marlin unpacks the formats that tensor cores lack.
    Raises ValueError.
    """
    if kernels not in ("vllm", "trtllm"):
        raise ValueError(f"kernels={kernels}: must be vllm or trtllm")
    fp4, fp8 = ("fp4" in device.peak_flops_per_s, "fp8" in device.peak_flops_per_s)
    server = device.memory_bandwidth_bytes_per_s > HBM_BYTES_PER_S
    blackwell, hopper = server and fp4, server and fp8 and not fp4
    if weights.bits == 4 and weights.compute == "fp8" and blackwell:
        return "trtllm_gen_w4a8"
    if weights.name == "mxfp4" and (blackwell or hopper):
        return "trtllm_gen_mxfp4" if blackwell else "triton_mxfp4"
    if weights.name == "nvfp4" and fp4:
        return "trtllm_gen_nvfp4" if blackwell else "cutlass_nvfp4"
    if weights.bits < 8 or weights.falls_back_on(device) or weights.name == "int8_wo":
        return "marlin_blackwell" if blackwell else "marlin_hopper" if hopper else "marlin"
    if weights.name == "int8":
        return "triton_fp8"
    kind = weights.name if weights.name in ("fp8", "fp8_block") else "bf16"
    if blackwell:
        return f"trtllm_gen_{kind}"
    if fp4:
        return f"cutlass_{kind}"
    if kernels == "trtllm":
        return "cutlass_fp8_block" if hopper and kind == "fp8" else f"cutlass_{kind}"
    if kind == "bf16":
        return "triton_bf16"
    if hopper and kind == "fp8":
        return "cutlass_fp8_hopper"
    return "cutlass_fp8_block" if hopper and layer.ep_size > 1 else "triton_fp8"


class RankLoads(NamedTuple):
    """Expected tokens of the experts on the busiest rank, in groups of experts that are alike.

    Shapes [..., G]: the leading ones those of num_tokens, G groups (1, or one for each expert of the rank).
    """

    tokens: Floats
    """Of each expert of the group. Below 1: the probability that it gets a token."""
    num_experts: Floats
    """In the group."""

    @property
    def active_experts(self) -> Floats:
        return np.asarray((self.num_experts * np.minimum(1.0, self.tokens)).sum(axis=-1))

    @property
    def assignments(self) -> Floats:
        """Pairs of a token and an expert of this rank; balanced: num_tokens top_k / ep_size."""
        return np.asarray((self.num_experts * self.tokens).sum(axis=-1))


def rank_loads(num_tokens: ArrayLike, layer: ExpertLayer, routing: Routing) -> RankLoads:
    """Which experts of the busiest expert-parallel rank receive how many of num_tokens tokens.

    num_tokens are those that enter the layer on all ranks together, >= 1 each; this rank works on the
    assignments to its own experts. It gets at least one: some rank does.

    power_law: popularities are the quantiles u of the density, those on the busiest rank u^(1 / theta) with
    theta = ep_size^(n^-0.45), n experts a rank: the likely best of ep_size single experts, while ranks of
    many experts even out. Within 10 % (standard deviation) of the mean of draws with 8 to 512 experts on 2 to
    128 ranks.
    """
    m = np.asarray(num_tokens, dtype=np.float64)[..., None]
    experts, on_rank = layer.num_experts, layer.num_rank_experts
    if routing.exponent is not None:
        return _power_law_loads(m, layer, routing.exponent)
    assignments = np.maximum(1.0, m * layer.top_k / layer.ep_size)
    if routing.kind == "balanced":
        return RankLoads(assignments / on_rank, np.full_like(m, on_rank))
    active = np.maximum(1.0, on_rank * (1 - (1 - layer.top_k / experts) ** m))
    return RankLoads(assignments / active, active)


def _power_law_loads(m: Floats, layer: ExpertLayer, exponent: float) -> RankLoads:
    """m [..., 1]. Popularity of quantile u: the inverse of the distribution function of the density."""
    many = m * layer.top_k > layer.num_experts
    low = np.where(many, 1.0, 0.01) ** (1 - exponent)
    high = np.where(many, 0.8 * m, 2.0) ** (1 - exponent)

    def popularity(u: Floats) -> Floats:
        return np.asarray((low + (high - low) * u) ** (1 / (1 - exponent)))

    all_experts = popularity(_midpoints(layer.num_experts))
    summed = np.cumsum(all_experts, axis=-1)
    tokens_per_popularity = m * layer.top_k / summed[..., -1:]
    for crowded in range(1, layer.top_k):
        # no expert gets a token twice: what is too much for the most popular ones goes to the rest
        too_much = tokens_per_popularity * all_experts[..., -crowded, None] > m
        rest = m * (layer.top_k - crowded) / summed[..., -crowded - 1, None]
        tokens_per_popularity = np.where(too_much, rest, tokens_per_popularity)
    theta = layer.ep_size ** (layer.num_rank_experts**-0.45)
    on_rank = popularity(_midpoints(layer.num_rank_experts) ** (1 / theta))
    tokens = np.minimum(m, tokens_per_popularity * on_rank)
    tokens = tokens / np.minimum(1.0, tokens.sum(axis=-1, keepdims=True))
    return RankLoads(tokens, np.ones_like(tokens))


def _midpoints(count: int) -> Floats:
    return (np.arange(count) + 0.5) / count


def expected_active_experts(num_tokens: ArrayLike, layer: ExpertLayer, routing: Routing) -> Floats:
    """Experts of the busiest rank that receive at least one of num_tokens tokens (all ranks together).

    uniform, one rank: E (1 - (1 - k / E)^m); Mixtral (8 experts, top 2), 4 tokens: 8 (1 - 0.75^4) = 5.47.
    balanced: min(E, k m) / ep_size. power_law: the sum over its experts of min(1, expected tokens).
    """
    return rank_loads(num_tokens, layer, routing).active_experts


def moe_flops(num_tokens: ArrayLike, layer: ExpertLayer) -> Floats:
    """2 m k w: m tokens, k experts each, w weights of one (3 hidden intermediate if gated). On all EP ranks.

    Mixtral-8x7B, one token: 2 x 2 x 3 x 4,096 x 14,336 = 705e6.
    """
    return 2.0 * np.asarray(num_tokens, dtype=np.float64) * layer.top_k * layer.expert_weights


def moe_weight_bytes(
    num_tokens: ArrayLike, layer: ExpertLayer, weights: WeightFormat, routing: Routing
) -> Floats:
    """Bytes of weights that the busiest rank reads: those of its active experts, in expectation.

    Mixtral-8x7B in bf16, one token: 2 x 3 x 4,096 x 14,336 x 2 bytes = 705e6.
    """
    active = expected_active_experts(num_tokens, layer, routing)
    return active * layer.expert_weights * weights.bytes_per_weight


class MoeWork(NamedTuple):
    """What one call has to do, in figures of the data sheet: `work_seconds` applies a curve to it.

    Shapes [...]; those with [2, ...]: up and gate projection, then down projection.
    """

    num_kernels: Floats
    stream_s: Floats
    """[2, ...] at full bandwidth."""
    tiles_per_sm: Floats
    """[2, ...]"""
    padded_s: Floats
    """[2, ...] of the rows of tiles, at the family's factor of the peak."""
    fill_row_s: Floats
    """[2, ...] for each row of `tile_fill_rows`."""
    permute_s: Floats
    """At full bandwidth."""


def moe_work(
    num_tokens: ArrayLike,
    layer: ExpertLayer,
    weights: WeightFormat,
    device: Device,
    *,
    dtype: str = "bf16",
    kernels: str = "vllm",
    routing: Routing,
) -> MoeWork:
    """The part of `moe_seconds` that no curve changes."""
    m = np.asarray(num_tokens, dtype=np.float64)
    if m.size and not (m >= 1).all():
        raise ValueError(f"num_tokens={m.min():g}: must be >= 1; leave the layer out where no token enters")
    family = FAMILIES[kernel_family(device, layer, weights, kernels)]
    loads = rank_loads(m, layer, routing)
    hidden, inter, in_up = layer.hidden_size, layer.intermediate_size, layer.num_matrices - 1
    # of the two GEMMs: [weights an expert, reduction depth, output columns]
    size, depth, columns = np.array(
        [[in_up * hidden * inter, hidden * inter], [hidden, inter], [in_up * inter, hidden]], dtype=np.float64
    ).reshape(3, 2, *(1,) * m.ndim)
    tiles = (loads.num_experts * _whole(loads.tokens, family.max_tile_rows, _num_tiles)).sum(axis=-1)
    rows = (loads.num_experts * _whole(loads.tokens, family.max_tile_rows, _padded_rows)).sum(axis=-1)

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


def _whole(tokens: Floats, max_tile_rows: int, count: Callable[[Floats, int], Floats]) -> Floats:
    """Mean of count over experts that hold whole numbers of tokens, the two next to the expectation."""
    below = np.floor(tokens)
    return np.asarray(
        count(below, max_tile_rows) * (below + 1 - tokens)
        + count(below + 1, max_tile_rows) * (tokens - below)
    )


def _num_tiles(tokens: Floats, max_tile_rows: int) -> Floats:
    return np.ceil(tokens / max_tile_rows)


def _padded_rows(tokens: Floats, max_tile_rows: int) -> Floats:
    """Tiles are as high as the largest, or the next power of two above an expert's few tokens."""
    rows = max_tile_rows * np.ceil(tokens / max_tile_rows)
    tile = max_tile_rows // 2
    while tile >= MIN_TILE_ROWS:
        rows = np.where(tokens <= tile, tile, rows)
        tile //= 2
    return np.asarray(np.where(tokens > 0, rows, 0.0))


def work_seconds(work: MoeWork, curve: MoeCurve) -> Floats:
    """Seconds of the work on a device that the curve describes."""
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
    """Seconds of the routed experts of one layer on the busiest rank, elementwise over num_tokens.

    num_tokens: those that enter the layer on all expert-parallel ranks together, >= 1. With attention data
    parallelism that is the sum over its ranks. layer.intermediate_size is already divided by the tensor
    parallelism of the experts. Without router GEMM, shared experts, all-to-all and all-reduce.
    dtype: of the activations. kernels: vllm or trtllm, see `kernel_family`.

    H100, Mixtral-8x7B in bf16, balanced, 1 token, default curve: 2 experts of 352 MB at 0.95 of 3.35 TB/s are
    221 us (224 with the filling of pipelines), two tiles of 8 rows hide in it, 7 kernels of 5.3 us: 262 us.
    Raises ValueError.
    """
    work = moe_work(num_tokens, layer, weights, device, dtype=dtype, kernels=kernels, routing=routing)
    return work_seconds(work, curve)
