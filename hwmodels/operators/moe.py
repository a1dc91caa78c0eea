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
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hwmodels.checks import check_finite, check_whole
from hwmodels.devices.device import DTYPE_BYTES, Device
from hwmodels.exact import smaller
from hwmodels.model.quantization import WeightFormat

Floats = NDArray[np.float64]

TILE_COLUMNS = 128
"""Output columns of one tile of a grouped GEMM; usual for all kernels here."""

MIN_TILE_ROWS = 8
"""Tokens of the smallest tile (the n of an mma instruction with operands swapped)."""

ROUTINGS = ("balanced", "uniform", "zipf", "power_law")

SKEWED = ("zipf", "power_law")
"""Those of `ROUTINGS` with an exponent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Routing:
    """How the router spreads tokens over experts.

    balanced: as evenly as whole tokens allow. uniform: each token picks top_k experts at random.
    zipf: a token picks the i-th most popular expert with a chance that goes as i^-exponent, and is at most 1
    since its top_k experts differ; 0 is uniform. For engines: prices are smooth in the number of tokens.
    power_law: for rows of benchmarks only. The popularity x of an expert has density x^-exponent on
    [1, 0.8 num_tokens], on [0.01, 2] while there are no more assignments than experts. So NVIDIA's
    aiconfigurator draws the tokens that it measures with: 1.01 as seen in DeepSeek-R1, 1.2 as in Qwen3-235B.
    The switch is its generator's: one assignment more, and nearly all experts have work. No router does that.
    """

    kind: str = "balanced"
    exponent: float | None = None
    """Of zipf, >= 0, and of power_law, > 0 and not 1."""

    def __post_init__(self) -> None:
        if self.kind not in ROUTINGS:
            raise ValueError(f"kind={self.kind}: must be one of {', '.join(ROUTINGS)}")
        if self.exponent is None:
            if self.kind in SKEWED:
                usual = 0.5 if self.kind == "zipf" else 1.2
                raise ValueError(f"exponent=None: {self.kind} routing needs one; {usual} is usual")
            return
        if self.kind not in SKEWED:
            raise ValueError(f"exponent={self.exponent}: {self.kind} routing has none; leave it null")
        if self.kind == "zipf" and not 0 <= self.exponent < 10:
            raise ValueError(f"exponent={self.exponent}: must be >= 0 and < 10; 0 is uniform routing")
        if self.kind == "power_law" and not (0 < self.exponent < 10 and self.exponent != 1):
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

    compute_capability: str = "sm90"
    """For the kernels that libraries choose: sm80, sm90, sm100 or sm120 (take it for Ada, sm89, too)."""
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
        check_capability(self.compute_capability)
        for entry in fields(self):
            if entry.name == "compute_capability":
                continue
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

MARLIN = {"sm80": "marlin", "sm90": "marlin_hopper", "sm100": "marlin_blackwell", "sm120": "marlin"}
"""By compute capability."""


def check_capability(compute_capability: str) -> None:
    """Raises ValueError unless the kernels of such chips are known."""
    if compute_capability not in MARLIN:
        raise ValueError(
            f"compute_capability={compute_capability}: must be one of {', '.join(MARLIN)}; "
            "take that of the nearest relative"
        )


def kernel_family(
    device: Device,
    layer: ExpertLayer,
    weights: WeightFormat,
    kernels: str = "vllm",
    *,
    compute_capability: str,
) -> str:
    """The name in `FAMILIES` of what an engine runs there.

    vllm: the choices of vLLM 0.24, as measured. trtllm: the same on Blackwell, CUTLASS where vLLM runs Triton
    or its slow fp8 kernel; assumed, not measured. Marlin unpacks the formats that tensor cores lack. The
    device says no more than which formats its tensor cores have; Ada, which goes as sm120, lacks fp4.
    Raises ValueError.
    """
    if kernels not in ("vllm", "trtllm"):
        raise ValueError(f"kernels={kernels}: must be vllm or trtllm")
    check_capability(compute_capability)
    blackwell, hopper = compute_capability == "sm100", compute_capability == "sm90"
    fp4 = "fp4" in device.peak_flops_per_s
    if weights.bits == 4 and weights.compute == "fp8" and blackwell:
        return "trtllm_gen_w4a8"
    if weights.name == "mxfp4" and (blackwell or hopper):
        return "trtllm_gen_mxfp4" if blackwell else "triton_mxfp4"
    if weights.name == "nvfp4" and fp4:
        return "trtllm_gen_nvfp4" if blackwell else "cutlass_nvfp4"
    if weights.bits < 8 or weights.falls_back_on(device) or weights.name == "int8_wo":
        return MARLIN[compute_capability]
    if weights.name == "int8":
        return "triton_fp8"
    kind = weights.name if weights.name in ("fp8", "fp8_block") else "bf16"
    if blackwell:
        return f"trtllm_gen_{kind}"
    if compute_capability == "sm120" and fp4:
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
    """In the group; uniform and zipf: those expected to get a token."""
    spread: Floats
    """Standard deviation of the tokens of an expert that gets any; 0 where routing draws nothing."""

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

    zipf: experts are dealt to ranks one by one, the most popular first, as a load balancer would. The first
    rank, with experts 1, 1 + ep_size, ..., is then the busiest however many tokens there are. An expert that
    is picked with chance p gets m p of m tokens, and any at all with probability 1 - (1 - p)^m.
    power_law: popularities are the quantiles u of the density, those on the busiest rank u^(1 / theta) with
    theta = ep_size^(n^-0.45), n experts a rank: the likely best of ep_size single experts, while ranks of
    many experts even out. Within 10 % (standard deviation) of the mean of draws with 8 to 512 experts on 2 to
    128 ranks.
    """
    m = np.asarray(num_tokens, dtype=np.float64)[..., None]
    if routing.kind == "power_law":
        return _power_law_loads(m, layer, routing.exponent or 0.0)
    if routing.kind in ("uniform", "zipf"):
        return _drawn_loads(m, layer, routing.exponent or 0.0)
    assignments = np.maximum(1.0, m * layer.top_k / layer.ep_size)
    return RankLoads(
        assignments / layer.num_rank_experts, np.full_like(m, layer.num_rank_experts), np.zeros_like(m)
    )


def _drawn_loads(m: Floats, layer: ExpertLayer, exponent: float) -> RankLoads:
    """m [..., 1]. Each token draws its experts: tokens of one are binomial. Groups of `_zipf_groups`."""
    chance, log_missed, num_experts = _zipf_groups(layer.num_experts, layer.top_k, layer.ep_size, exponent)
    none = np.exp(m * log_missed)
    some = -np.expm1(m * log_missed)
    tokens = m * chance / some
    # of a binomial number, given that it is not 0
    variance = np.maximum(0.0, tokens * (1 - chance) - tokens * tokens * none)
    active = num_experts * some
    at_least_one = active / np.minimum(1.0, active.sum(axis=-1, keepdims=True))
    return RankLoads(tokens, at_least_one, np.sqrt(variance))


@lru_cache(maxsize=256)
def _zipf_groups(
    num_experts: int, top_k: int, ep_size: int, exponent: float
) -> tuple[Floats, Floats, Floats]:
    """Chance p that a token picks an expert, log(1 - p), and experts of the busiest rank, by group [G].

    The first 16 experts are groups of their own, then neighbours whose ranks differ by a 16th at most share
    their mean chance: 512 experts make 66 groups. Active experts change by some 0.1 % at most.
    """
    chances = zipf_chances(num_experts, top_k, exponent)[::ep_size]
    starts = [0]
    while (following := starts[-1] + 1 + starts[-1] // 16) < len(chances):
        starts.append(following)
    members = np.diff([*starts, len(chances)]).astype(np.float64)
    chance = np.minimum(1.0, np.add.reduceat(chances, starts) / members)
    with np.errstate(divide="ignore"):  # chance 1: log 0
        log_missed = np.log1p(-chance)
    for array in (chance, log_missed, members):
        array.flags.writeable = False  # all calls share it
    return chance, log_missed, members


def zipf_chances(num_experts: int, top_k: int, exponent: float) -> Floats:
    """Chance that a token picks each expert, the most popular first [num_experts]; they add up to top_k.

    They go as i^-exponent, at most 1: what is above goes to the less popular experts in proportion.
    Three experts, top 2, exponent 1: 2 (6, 3, 2) / 11 would give 12 / 11 to the first; so 1, 3 / 5 and 2 / 5.
    """
    weights = np.arange(1.0, num_experts + 1) ** -exponent
    from_rank_on = np.cumsum(weights[::-1])[::-1]
    # with the first i experts at the cap: (top_k - i) / the sum of the others' weights
    scale = (top_k - np.arange(top_k)) / from_rank_on[:top_k]
    capped = int(np.argmax(scale * weights[:top_k] <= 1))
    chances = scale[capped] * weights
    chances[:capped] = 1.0
    return np.asarray(chances)


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
    return RankLoads(tokens, np.ones_like(tokens), np.zeros_like(tokens))


def _midpoints(count: int) -> Floats:
    return (np.arange(count) + 0.5) / count


def expected_active_experts(num_tokens: ArrayLike, layer: ExpertLayer, routing: Routing) -> Floats:
    """Experts of the busiest rank that receive at least one of num_tokens tokens (all ranks together).

    uniform, one rank: E (1 - (1 - k / E)^m); Mixtral (8 experts, top 2), 4 tokens: 8 (1 - 0.75^4) = 5.47.
    balanced: min(E, k m) / ep_size. zipf: the sum over its experts of 1 - (1 - p)^m, with one rank no more
    than uniform. power_law: the sum over its experts of min(1, expected tokens).
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
    compute_capability: str,
) -> MoeWork:
    """The part of `moe_seconds` that no fitted figure changes."""
    m = np.asarray(num_tokens, dtype=np.float64)
    if m.size and not (m >= 1).all():
        raise ValueError(f"num_tokens={m.min():g}: must be >= 1; leave the layer out where no token enters")
    family = FAMILIES[kernel_family(device, layer, weights, kernels, compute_capability=compute_capability)]
    loads = rank_loads(m, layer, routing)
    hidden, inter, in_up = layer.hidden_size, layer.intermediate_size, layer.num_matrices - 1
    # of the two GEMMs: [weights an expert, reduction depth, output columns]
    size, depth, columns = np.array(
        [[in_up * hidden * inter, hidden * inter], [hidden, inter], [in_up * inter, hidden]], dtype=np.float64
    ).reshape(3, 2, *(1,) * m.ndim)
    tiles, rows = _tiles_and_rows(loads, family.max_tile_rows)

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


def _tiles_and_rows(loads: RankLoads, max_tile_rows: int) -> tuple[Floats, Floats]:
    """Tiles of all experts of the rank, and their rows.

    Tiles are as high as the largest, or the next power of two above an expert's few tokens. An expert holds a
    whole number of tokens: u rounded up, where u may be anywhere in a window. It is as wide as the loads'
    spread asks, and 1 at least, for expectations between whole numbers: experts fill tiles one by one.
    """
    width = np.minimum(np.sqrt(1 + 12 * loads.spread**2), np.maximum(1.0, 2 * loads.tokens - 1))
    high = loads.tokens - 0.5 + width / 2
    low = np.maximum(0.0, high - width)  # no tokens, no tile

    def tiles_up_to(u: Floats) -> Floats:
        """Integral of the tiles of an expert with 0 to u tokens; the same below for rows."""
        full = np.floor(u / max_tile_rows)
        return np.asarray((full + 1) * (u - max_tile_rows * full / 2))

    def rows_up_to(u: Floats) -> Floats:
        rows = max_tile_rows * tiles_up_to(u)
        height = max_tile_rows // 2
        while height >= MIN_TILE_ROWS:  # each height that will do saves as many rows
            rows = rows - height * np.minimum(u, height)
            height //= 2
        return np.asarray(rows)

    def mean(up_to: Callable[[Floats], Floats]) -> Floats:
        return np.asarray((loads.num_experts * (up_to(high) - up_to(low)) / width).sum(axis=-1))

    return mean(tiles_up_to), mean(rows_up_to)


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
