"""Dense matrix multiplication: seconds of out[m, n] = x[m, k] w[k, n] on one device.

Elementwise operators over the activations, such as norms, are here as well (`stream_seconds`).

The output is cut into tiles. Each SM computes one tile at a time, so tiles run in waves over the SMs;
meanwhile weights and activations are loaded from memory. The longer of the two hides most of the shorter:

    t = start + input + (tiles^3 + stream^3)^(1/3)

    tiles   waves x (k / splits x step + store) + merge, for the cheapest tile shape and split of k
    step    max(2 rows columns / FLOP/s, (rows x_bytes + columns w_bytes) / l2): one SM, one tile, one of k
    waves   number of tiles x splits / SMs, partly rounded up, to the extent of wave_share
    store   output bytes of a tile / store: the SM computes nothing meanwhile
    merge   summing the parts of a split k
    stream 0.4 us + (bytes of weights, and of everything else that does not fit in the L2) / (bandwidth share)
    input   quantising x, if the tensor cores take the weights' type: separate kernels

`GemmCurve` holds the parameters of a device. `GemmKernels` holds the differences between kernel families
(tiles, splits of k, preceding kernels): one set of values for all chips of a kind, from A100, H100, H200,
B200 and RTX PRO 6000 (NVIDIA aiconfigurator, commit 095f58a).

H100, defaults, bf16, m = 16, n = 7168, k = 4096: 112 tiles of 64 x 64, less than one wave. step: 256 bytes at
150e9 bytes/s, 1.71 ns; store 0.05 us; tiles 7.04 us. 58.95e6 bytes at 0.82 x 3.35e12 bytes/s: stream 21.9 us.
t = 2.4 us + 22.1 us = 24.5 us; measured between m = 8 and 17: 22.4 us to 25.7 us.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hwmodels.checks import check_curve
from hwmodels.device import DTYPE_BYTES, Device
from hwmodels.exact import Num
from hwmodels.model.weights import WeightFormat

Floats = NDArray[np.float64]

MEMORY_START_S = 0.4e-6
"""Seconds until the first operands arrive from memory."""

CACHED_ACTIVATIONS_SHARE = 0.5
"""Share of the L2 that still holds the previous operator's output; each half of the chip has a copy."""

CACHED_WEIGHTS_SHARE = 0.1
"""Share of the L2 that still holds the weights of a repeated call; benchmarks repeat calls, models do not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmCurve:
    """Performance of tuned GEMM kernels on one device. Defaults are medians over five devices."""

    compute_capability: str = "sm90"
    """Compute capability, which decides the kernels: sm80, sm89, sm90, sm100, or sm120."""
    start_s: float = 2.4e-6
    """Seconds of launch, start and drain of one kernel in a stream."""
    bandwidth_share: float = 0.82
    """Share of the data-sheet memory bandwidth reached when streaming large matrices."""
    flops_share: float = 0.84
    """Share of the peak in bf16, fp16, tf32, fp32 once a tile's operands have arrived."""
    flops_share_8bit: float = 0.77
    """Share of the peak in fp8 and int8 once a tile's operands have arrived."""
    flops_share_4bit: float = 0.70
    """Share of the peak in fp4; measured on two devices only, 0.53 (B200) and 0.88 (RTX PRO 6000)."""
    l2_bytes_per_sm_s: float = 150e9
    """Bytes/s of operands that one SM loads from the L2; 50e9 if tiles cannot share loads (A100, RTX)."""
    store_bytes_per_sm_s: float = 40e9
    """Bytes/s of outputs that one SM stores into the L2."""
    wave_share: float = 0.27
    """Degree to which the last wave takes as long as a full one, 0 to 1; 0: stream-K spreads its work."""
    narrow_tiles: bool = False
    """Whether tiles of 16 and 32 rows are also offered. On fast tensor cores they save nothing, and no
    measurement shows them. On limited ones (H20), larger tiles would make a small batch compute padding.
    """

    def __post_init__(self) -> None:
        check_curve(self, capabilities=CUBLAS, zero_allowed="wave_share")


class Tile(NamedTuple):
    """The output part that one SM computes at a time, and the range of m for which libraries offer it."""

    rows: int
    columns: int
    min_m: float = 0.0
    max_m: float = np.inf


VECTOR_TILE = Tile(1, 64, max_m=1)
"""A matrix-vector product on a device without matrix units, which needs no padding."""
NARROW_TILES = (Tile(16, 64), Tile(32, 64))
"""Tiles of `GemmCurve.narrow_tiles`: tensor cores of sm80 and later accept 8 or more rows of one operand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmKernels:
    """Differences of one kernel family from the others, equal on every device."""

    tiles: tuple[Tile, ...] = (Tile(64, 64), Tile(64, 128), Tile(128, 128), Tile(128, 256))
    """Tile shapes; the fastest of those offered for this m is used."""
    splits: tuple[int, ...] = (1,)
    """Possible numbers of parts of a split k, each with its own tiles."""
    merge_s: float = 2.8e-6
    """Seconds to sum the parts of a split k: a second kernel, or synchronisation of the parts."""
    flops: float = 1.0
    """Factor on the device's share of the peak."""
    before_s: float = 0.0
    """Seconds of the preceding kernels: quantisation, or the rest of a single-layer TensorRT engine."""
    quantise_row_s: float = 0.0
    """Seconds per row of activations on one SM, if each row is one thread block."""
    quantise_bytes_per_sm_s: float = 15e9
    """Bytes/s of activations on one SM, read in their own dtype and written quantised."""


CUBLAS_SM80 = GemmKernels(splits=(1, 2, 4, 8, 16, 32))
CUBLAS_SM90 = replace(CUBLAS_SM80, merge_s=3.2e-6)
CUBLAS_SM100 = replace(CUBLAS_SM80, merge_s=3.7e-6)
CUBLAS_SM120 = replace(CUBLAS_SM80, tiles=(Tile(64, 64), Tile(128, 128)), merge_s=2.4e-6)
CUBLAS_SM89 = replace(CUBLAS_SM80, merge_s=2.4e-6)
"""cuBLAS on Ada runs Ampere's kernels (their names begin with ampere_ and cutlass_80); no rows are from Ada.
"""
CUBLAS = {
    "sm80": CUBLAS_SM80,
    "sm89": CUBLAS_SM89,
    "sm90": CUBLAS_SM90,
    "sm100": CUBLAS_SM100,
    "sm120": CUBLAS_SM120,
}
"""GEMMs of one 16- or 32-bit dtype, and of unmeasured 8- and 4-bit tensor cores."""
CUBLAS_FP8_SM90 = replace(CUBLAS_SM90, before_s=9.7e-6, quantise_bytes_per_sm_s=11.5e9)
"""TensorRT-LLM as a PyTorch module, which computes the scale and then quantises."""
CUBLAS_FP8_SM100 = replace(CUBLAS_SM100, before_s=12.1e-6, quantise_bytes_per_sm_s=16e9)
CUBLAS_FP8_SM120 = replace(CUBLAS_SM120, before_s=9.7e-6, quantise_bytes_per_sm_s=11.5e9)
CUBLAS_FP8_SM89 = replace(CUBLAS_SM89, before_s=9.7e-6, quantise_bytes_per_sm_s=11.5e9)
CUTLASS_8BIT = GemmKernels(before_s=2.4e-6, quantise_row_s=0.85e-6)
"""vLLM with one scale per row of activations."""
CUTLASS_8BIT_SM90 = replace(
    CUTLASS_8BIT,
    tiles=(Tile(64, 64, max_m=64), Tile(64, 128, min_m=64, max_m=128), Tile(128, 128, min_m=128)),
)
"""vLLM on sm90, where the tile follows from m alone."""
CUTLASS_8BIT_SM100 = replace(CUTLASS_8BIT, before_s=3.5e-6)
CUTLASS_8BIT_SM120 = replace(
    CUTLASS_8BIT, tiles=(Tile(64, 64, max_m=256), Tile(128, 128, min_m=256)), quantise_row_s=0.57e-6
)
CUTLASS_8BIT_SM89 = replace(
    CUTLASS_8BIT,
    tiles=(
        Tile(32, 64, max_m=32),
        Tile(64, 64, min_m=32, max_m=64),
        Tile(64, 128, min_m=64, max_m=256),
        Tile(128, 128, min_m=128),
    ),
    quantise_row_s=0.57e-6,
)
"""vLLM on sm89: tiles of scaled_mm_c2x_sm89_fp8_dispatch.cuh, which follow from m (and n, left out here)."""
FP8_BLOCK_SM90 = GemmKernels(flops=0.73, before_s=2.2e-6, quantise_bytes_per_sm_s=12e9)
"""Block-scaled fp8, which sums 128 products outside the tensor cores (DeepSeek-V3, section 3.3.2)."""
FP8_BLOCK_SM100 = GemmKernels(before_s=3.9e-6, quantise_bytes_per_sm_s=40e9)
"""Block-scaled fp8 on sm100, where tensor cores apply the scales."""
FP8_BLOCK_SM120 = replace(FP8_BLOCK_SM90, flops=0.8, before_s=3.8e-6)
FP8_BLOCK_SM89 = replace(FP8_BLOCK_SM90, tiles=(Tile(64, 128),), flops=0.6)
"""vLLM and SGLang on sm89: a Triton kernel with tiles of 64 x 128 for every m, in two stages.

No row measures it. Its share is below that of CUTLASS kernels, which have more stages in flight.
"""
FP8_BLOCK_SM120_TRTLLM = replace(FP8_BLOCK_SM120, quantise_row_s=3.9e-6)
NVFP4_SM100 = GemmKernels(
    tiles=(Tile(64, 128), Tile(128, 128), Tile(128, 256)), before_s=4.7e-6, quantise_bytes_per_sm_s=50e9
)
NVFP4_SM100_TRTLLM = GemmKernels(tiles=(Tile(128, 256),), before_s=4.1e-6, quantise_bytes_per_sm_s=26e9)
NVFP4_SM120 = GemmKernels(tiles=(Tile(128, 128),), before_s=4.3e-6, quantise_bytes_per_sm_s=20e9)
NVFP4_SM120_TRTLLM = replace(NVFP4_SM120, before_s=2.2e-6, quantise_bytes_per_sm_s=14e9)
INT8_TRTLLM = GemmKernels(before_s=6.9e-6, quantise_bytes_per_sm_s=100e9)
"""A single-layer TensorRT engine with an already quantised input."""
WEIGHT_ONLY = GemmKernels(
    tiles=(Tile(16, 256), Tile(64, 64), Tile(64, 128), Tile(128, 128)), splits=(1, 2, 4), flops=0.88
)
"""Weight-only GEMMs, which unpack weights before the tensor cores."""
WEIGHT_ONLY_TRTLLM = replace(WEIGHT_ONLY, merge_s=12e-6, before_s=6.8e-6)
"""Weight-only GEMMs in a single-layer TensorRT engine."""

KERNELS = {
    ("vllm", "fp8", "sm89"): CUTLASS_8BIT_SM89,
    ("vllm", "fp8", "sm90"): CUTLASS_8BIT_SM90,
    ("vllm", "fp8", "sm100"): CUTLASS_8BIT_SM100,
    ("vllm", "fp8", "sm120"): CUTLASS_8BIT_SM120,
    ("vllm", "fp8_block", "sm89"): FP8_BLOCK_SM89,
    ("vllm", "fp8_block", "sm90"): FP8_BLOCK_SM90,
    ("vllm", "fp8_block", "sm100"): FP8_BLOCK_SM100,
    ("vllm", "fp8_block", "sm120"): FP8_BLOCK_SM120,
    ("vllm", "int8", "sm80"): CUTLASS_8BIT,
    ("vllm", "int8", "sm89"): CUTLASS_8BIT_SM89,
    ("vllm", "int8", "sm90"): CUTLASS_8BIT_SM90,
    ("vllm", "int8", "sm100"): CUTLASS_8BIT_SM100,
    ("vllm", "int8", "sm120"): CUTLASS_8BIT_SM120,
    ("vllm", "nvfp4", "sm100"): NVFP4_SM100,
    ("vllm", "nvfp4", "sm120"): NVFP4_SM120,
    ("trtllm", "fp8", "sm89"): CUBLAS_FP8_SM89,
    ("trtllm", "fp8", "sm90"): CUBLAS_FP8_SM90,
    ("trtllm", "fp8", "sm100"): CUBLAS_FP8_SM100,
    ("trtllm", "fp8", "sm120"): CUBLAS_FP8_SM120,
    ("trtllm", "fp8_block", "sm89"): FP8_BLOCK_SM120_TRTLLM,
    ("trtllm", "fp8_block", "sm90"): FP8_BLOCK_SM90,
    ("trtllm", "fp8_block", "sm100"): FP8_BLOCK_SM100,
    ("trtllm", "fp8_block", "sm120"): FP8_BLOCK_SM120_TRTLLM,
    ("trtllm", "int8", "sm80"): INT8_TRTLLM,
    ("trtllm", "int8", "sm89"): INT8_TRTLLM,
    ("trtllm", "nvfp4", "sm100"): NVFP4_SM100_TRTLLM,
    ("trtllm", "nvfp4", "sm120"): NVFP4_SM120_TRTLLM,
    ("trtllm", "weight_only", "sm80"): WEIGHT_ONLY_TRTLLM,
    ("trtllm", "weight_only", "sm89"): WEIGHT_ONLY_TRTLLM,
}
"""Kernels by library, weight format, compute capability; other formats run as `WEIGHT_ONLY` or `CUBLAS`.

If their activations are quantised, a preceding kernel does it, at a cost between those of the families.
"""
QUANTISE_S = 3.5e-6
"""`GemmKernels.before_s` of formats without measurements on a compute capability."""

LIBRARIES = ("vllm", "trtllm")


def kernels_of(weights: WeightFormat, device: Device, curve: GemmCurve, kernels: str) -> GemmKernels:
    """Returns the library's family for these weights. Raises ValueError for an unknown library."""
    if kernels not in LIBRARIES:
        raise ValueError(f"kernels={kernels}: must be one of {', '.join(LIBRARIES)}")
    weight_only = weights.bits < 16 and (weights.compute is None or weights.falls_back_on(device))
    cublas = CUBLAS[curve.compute_capability]
    quantised = replace(cublas, before_s=QUANTISE_S) if weights.bits < 16 else cublas
    name, otherwise = ("weight_only", WEIGHT_ONLY) if weight_only else (weights.name, quantised)
    return KERNELS.get((kernels, name, curve.compute_capability), otherwise)


def gemm_seconds(
    m: ArrayLike,
    n: ArrayLike,
    k: ArrayLike,
    weights: WeightFormat,
    device: Device,
    curve: GemmCurve,
    *,
    dtype: str = "bf16",
    kernels: str = "vllm",
    repeated: bool = False,
    fused_input: bool = False,
) -> Floats:
    """Returns seconds of one call; m, n, k broadcast and need not be whole (n / tensor-parallel size).

    m = 0 takes 0 s. dtype: of activations and outputs. repeated: the same call ran right before, as in
    benchmarks, so that small weights are still in the L2. fused_input: kernels before the GEMM
    (`GemmKernels.before_s`, quantisation) belong to the preceding operator and are not counted here. Raises
    ValueError for an unknown library, or a dtype that the device does not support.
    """
    family = kernels_of(weights, device, curve, kernels)
    m, n, k = np.broadcast_arrays(*(np.asarray(size, dtype=np.float64) for size in (m, n, k)))
    elements = element_bytes(weights, device, dtype)
    stream_s = streamed_bytes(m, n, k, elements, device, repeated) / (
        device.memory_bandwidth_bytes_per_s * curve.bandwidth_share
    )
    flops_per_sm_s = reached_flops_per_sm_s(weights.compute_dtype(device, dtype), device, curve, family)
    tiles_s = fastest_tiles_seconds(m, n, k, elements, flops_per_sm_s, device, curve, family)
    seconds = curve.start_s + np.cbrt(tiles_s**3 + (stream_s + MEMORY_START_S) ** 3)
    if not fused_input:
        seconds = seconds + input_seconds(m, k, elements, device, family)
    return np.where(m > 0, seconds, 0.0)


class ElementBytes(NamedTuple):
    """Bytes of one element, including its share of scales."""

    x: float
    """Bytes of activations in the format of the tensor cores."""
    w: float
    out: float
    """Bytes of outputs, and of activations before they are quantised."""


def element_bytes(weights: WeightFormat, device: Device, dtype: str) -> ElementBytes:
    """Returns the bytes per element of arithmetic, weights and activations on a device."""
    activations = device.compute_dtype(dtype)
    compute = weights.compute_dtype(device, dtype)
    scales = weights.scale_bytes_per_weight if compute == "fp4" else 0.0
    return ElementBytes(DTYPE_BYTES[compute] + scales, weights.bytes_per_weight, DTYPE_BYTES[activations])


def reached_flops_per_sm_s(compute: str, device: Device, curve: GemmCurve, family: GemmKernels) -> float:
    """Returns the FLOP/s of one SM in a tile after its operands have arrived."""
    shares = {"fp8": curve.flops_share_8bit, "int8": curve.flops_share_8bit, "fp4": curve.flops_share_4bit}
    share = shares.get(compute, curve.flops_share) * family.flops
    return device.peak_flops_per_s[compute] * share / device.num_sms


def streamed_bytes(
    m: Floats, n: Floats, k: Floats, elements: ElementBytes, device: Device, repeated: bool
) -> Floats:
    """Returns bytes to and from memory: outputs; activations and repeated weights if they miss the L2."""
    w, x, out = n * k * elements.w, m * k * elements.x, m * n * elements.out
    x = x * (1 - found_share(x, CACHED_ACTIVATIONS_SHARE * device.l2_bytes))
    if repeated:
        w = w * (1 - found_share(w + m * k * elements.x + out, CACHED_WEIGHTS_SHARE * device.l2_bytes))
    return w + x + out


def found_share(num_bytes: Floats, cache_bytes: float) -> Floats:
    """Returns the cached share of a tensor: 1 up to the cache size, 0 from twice that size, else linear.

    Least recently used data is evicted first, so reading a tensor in order evicts what will be read next.
    """
    return np.clip(2 * cache_bytes / np.maximum(num_bytes, 1) - 1, 0, 1)


def fastest_tiles_seconds(
    m: Floats,
    n: Floats,
    k: Floats,
    elements: ElementBytes,
    flops_per_sm_s: float,
    device: Device,
    curve: GemmCurve,
    family: GemmKernels,
) -> Floats:
    """Returns seconds of all waves of tiles, for the best of the family's tiles and splits of k."""
    l2_bytes_per_s = device.num_sms * curve.l2_bytes_per_sm_s
    best = np.full(m.shape, np.inf)
    vector = () if device.has_matrix_units else (VECTOR_TILE,)
    for tile in (*family.tiles, *vector, *(NARROW_TILES if curve.narrow_tiles else ())):
        offered = (m > tile.min_m) & (m <= tile.max_m)
        full_sms = np.ceil(m / tile.rows) * np.ceil(n / tile.columns) / device.num_sms
        flops = 2 * tile.rows * tile.columns
        operands = tile.rows * elements.x + tile.columns * elements.w
        step_s = max(flops / flops_per_sm_s, operands / curve.l2_bytes_per_sm_s)
        outputs = np.minimum(tile.rows, m) * np.minimum(tile.columns, n)
        store_s = outputs * elements.out / curve.store_bytes_per_sm_s
        for splits in family.splits:
            seconds = waves(full_sms * splits, curve.wave_share) * (k / splits * step_s + store_s)
            if splits > 1:  # fp32 sums, written and read
                seconds = seconds + family.merge_s + splits * 8 * m * n / l2_bytes_per_s
            best = np.minimum(best, np.where(offered, seconds, np.inf))
    return best


def waves(full_sms: Floats, wave_share: float) -> Floats:
    """Returns the number of waves in which the SMs process full_sms x SMs tiles; at least one."""
    return wave_share * np.ceil(full_sms) + (1 - wave_share) * np.maximum(full_sms, 1)


def input_seconds(
    m: Floats, k: Floats, elements: ElementBytes, device: Device, family: GemmKernels
) -> Floats:
    """Returns seconds of the kernels before the GEMM; no quantisation if activations keep their dtype."""
    if elements.x >= elements.out:
        return np.full(m.shape, family.before_s)
    row_s = family.quantise_row_s + k * (elements.out + elements.x) / family.quantise_bytes_per_sm_s
    return family.before_s + m * row_s / device.num_sms


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamCurve:
    """Performance of kernels without data reuse."""

    bandwidth_share: float = 0.80
    """Share of the data-sheet memory bandwidth reached for tensors of many megabytes."""
    start_s: float = 2.0e-6
    """Seconds of start and drain of one kernel in a stream; small norms take 2 us."""

    def __post_init__(self) -> None:
        check_curve(self)


def stream_seconds(num_bytes: Num, device: Device, curve: StreamCurve, *, kernels: float = 1) -> Num:
    """Returns seconds of elementwise kernels: kernels start_s + bytes / (B share), read and written bytes.

    H100, 4 MiB, share 0.8: 2.0 us + 4,194,304 / (0.8 x 3.35e12) = 3.57 us.
    """
    return kernels * curve.start_s + num_bytes / (device.memory_bandwidth_bytes_per_s * curve.bandwidth_share)
