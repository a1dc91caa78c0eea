"""Kernels of LoRA adapters: the cost of a shrink and an expand of one projection, per engine.

For y += (x A) B, with x[T, k], A[k, r] and B[r, n] of the adapter of each token, an engine runs a shrink
(x A, r columns) and an expand (B, r deep). With a rank of 8 to 64 both fill a small part of a tile, so the
cost depends on the grid of thread blocks instead of the arithmetic:

    tiles      row tiles x column tiles x splits of k, per fused slice (q, k, v; gate, up). A row tile holds
               tokens of one adapter (`adapter`), of one sequence (`sequence`), or one token (`token`)
    operands   bytes that the tiles load and store, padded rows included, at OPERAND_BYTES_PER_SM_S on each
               SM; a kernel takes at least as long as one tile on an SM that it shares with RESIDENT_TILES
    weights    bytes of the adapters in the batch, read once from memory
    launched thread blocks of the grid: in vLLM every slot of max_loras has its own blocks. Blocks without
    tokens end at once, but a GPU starts only one per BLOCK_CYCLES

Sources: the kernels' launch code in vLLM 0.5 to 0.32 and SGLang 0.4 to 0.5, Punica (MLSys 2024), S-LoRA
(MLSys 2024); the four constants are fitted to measurements of whole engines: docs/adapters.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from hwmodels.checks import check_finite, check_whole
from hwmodels.device import Device
from hwmodels.exact import larger, smaller
from hwmodels.operators.gemm import StreamCurve

OPERAND_BYTES_PER_SM_S = 11.6e9
"""Operand bytes/s of the tiles on one SM. vLLM 0.8.5 on an H100: 0.33 ms per adapter of rank 8 in a step of
Llama-3.1-8B, in which its tiles move 505 MB: 505e6 / 0.33e-3 / 132 SMs."""
RESIDENT_TILES = 3.3
"""Tiles that share an SM: vLLM's expand of q, k and v takes 14 us with 128 columns per tile, 10 us with 64.
"""
TILE_START_S = 2.0e-6
"""Seconds of a tile before its first operand: four dependent loads of indices."""
BLOCK_CYCLES = 1.65
"""Clock cycles in which a GPU starts one thread block. vLLM 0.8.5 with 300 slots, one used, on an H100: 18.6
million blocks take 17 ms of a step.
"""
CLOCK_HZ = 1.7e9
"""Clock of devices without a known one."""
SECTOR_BYTES = 32
"""Minimum bytes moved by a load of non-adjacent values; expand reads r adjacent values of each column."""
PEAK_SHARE = 0.25
"""Share of the dense peak reached by ranks of 8 to 64, which fill this share of a tile's columns."""


class Grid(NamedTuple):
    """Tiles of a kernel: rows (tokens), columns (shrink: ranks; expand: outputs), and splits.

    splits: parts of k in shrink, in separate blocks or in flight at once; in expand, the number of column
    tiles, if more than one.
    """

    rows: int
    columns: int
    splits: int = 1
    rows_of: str = "adapter"
    """Tokens that share a row tile: all of an `adapter`, all of a `sequence`, or one `token`."""


class Grids(NamedTuple):
    """The grids of a shrink and of the expand after it."""

    shrink: Grid
    expand: Grid


class LoraFamily(NamedTuple):
    """The kernels of one generation of an engine."""

    grids: Grids
    small: Grids | None = None
    """Grids of iterations with at most small_tokens tokens; without that limit, of decode-only iterations."""
    small_tokens: int | None = None
    fuses_slices: bool = True
    """Whether one kernel computes q, k and v, or gate and up; if not, each has its own."""
    fills: int = 1
    """Number of small kernels per projection that fill buffers, or scale and add."""
    has_slot_grid: bool = False
    """Whether the grid has thread blocks for every slot, used or not, and for tokens without an adapter."""
    captured: bool = True
    """Whether decode-only iterations with adapters run as CUDA graphs."""
    speed: float = 1.0
    """Operand bytes/s relative to `OPERAND_BYTES_PER_SM_S`, which holds for Triton's kernels."""
    launch_s: float = 30e-6
    """CPU seconds for a shrink or an expand outside of CUDA graphs: Python, fills and launch."""


_VLLM = Grids(Grid(32, 16, 8), Grid(64, 128))
_VLLM_SMALL = Grids(Grid(32, 16, 64), Grid(64, 128))
_PUNICA = Grids(Grid(1, 16, 16, rows_of="token"), Grid(1, 128, rows_of="token"))
_SEGMENTS = Grids(Grid(16, 16, 8), Grid(16, 128))

FAMILIES: dict[str, LoraFamily] = {
    # vLLM 0.8 and later. Python, a custom operator and Triton's launcher take about 70 us per kernel.
    "vllm": LoraFamily(_VLLM, _VLLM_SMALL, 127, has_slot_grid=True, launch_s=70e-6),
    # vLLM 0.5.4 to 0.7, engine V0: BGMV for decodes, SGMV for prompts, one kernel per slice.
    "vllm_v0": LoraFamily(
        Grids(Grid(32, 16, 8), Grid(32, 32)),
        Grids(Grid(1, 16, 64, rows_of="token"), Grid(1, 64, 64, rows_of="token")),
        fuses_slices=False,
        launch_s=75e-6,
    ),
    # Punica's BGMV, also in vLLM 0.3 to 0.5.3: CUDA kernels, one token per tile, also for prompts. The speed
    # is fitted to vLLM 0.5.0 on an H100: 17 % more time with adapters of rank 16.
    "punica": LoraFamily(_PUNICA, fuses_slices=False, speed=2.0, launch_s=15e-6),
    # S-LoRA's MBGMM for prompts and MBGMV for decodes, and LoRAX's SGMV and BGMV: no CUDA graphs.
    "slora": LoraFamily(_SEGMENTS, _PUNICA, fuses_slices=False, captured=False, launch_s=15e-6),
    "lorax": LoraFamily(_SEGMENTS, _PUNICA, fuses_slices=False, captured=False, launch_s=30e-6),
    # SGLang: sgemm kernels with a segment per sequence; chunked SGMV with segments of up to 32 tokens.
    "sglang_triton": LoraFamily(
        Grids(Grid(16, 16, 4, rows_of="sequence"), Grid(16, 256, rows_of="sequence")), fills=0, launch_s=40e-6
    ),
    "sglang_csgmv": LoraFamily(
        Grids(Grid(32, 16, 4), Grid(32, 64)),
        Grids(Grid(16, 16, 4), Grid(16, 64)),
        63,
        fills=0,
        launch_s=40e-6,
    ),
    # TensorRT-LLM: CUTLASS grouped GEMMs for shrink and expand of every module, outside of CUDA graphs.
    "trtllm": LoraFamily(
        Grids(Grid(16, 32, 16), Grid(32, 128)), fuses_slices=False, fills=0, captured=False, launch_s=20e-6
    ),
    # Hugging Face PEFT: two dense products, a scaling and a sum for each projection, in eager PyTorch.
    "peft": LoraFamily(
        Grids(Grid(64, 64, 8), Grid(64, 64)), fuses_slices=False, fills=6, captured=False, launch_s=60e-6
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraKernels:
    """The properties of an engine's LoRA kernels that affect times."""

    backend: str = "vllm"
    """Kernels: a key of `FAMILIES`."""
    max_loras: int | None = None
    """Number of slots in grids that include every slot; None: the slots of the adapter policy."""
    specialize_active_lora: bool = False
    """Whether that grid has only the adapters in the batch (vLLM's option of a CUDA graph per number of
    adapters).
    """
    cudagraph_specialize_lora: bool = True
    """Whether batches without adapters run without these kernels: vLLM's CUDA graphs from 0.11.1 on."""
    fully_sharded_loras: bool = False
    """Whether tensor-parallel ranks also divide the half of each adapter that they otherwise duplicate."""
    captured: bool | None = None
    """Whether decode-only iterations with adapters run as CUDA graphs; None: the backend's choice."""
    launch_s: float | None = None
    """CPU seconds to launch a shrink or an expand outside of CUDA graphs; None: the backend's."""

    def __post_init__(self) -> None:
        if self.backend not in FAMILIES:
            raise ValueError(f"backend={self.backend}: must be one of {', '.join(FAMILIES)}")
        if self.max_loras is not None:
            check_whole("max_loras", self.max_loras, remedy="; null for the slots of the adapter policy")
        if self.launch_s is not None:
            check_finite("launch_s", self.launch_s, unit="s", zero_allowed=True)

    @property
    def family(self) -> LoraFamily:
        return FAMILIES[self.backend]

    @property
    def is_captured(self) -> bool:
        """True if decode-only iterations with adapters run as CUDA graphs."""
        return self.family.captured if self.captured is None else self.captured

    @property
    def seconds_per_launch(self) -> float:
        """CPU seconds to launch a shrink or an expand outside of CUDA graphs."""
        return self.family.launch_s if self.launch_s is None else self.launch_s


class LoraWork(NamedTuple):
    """Tokens and adapters of an iteration on one device. Numbers or arrays."""

    batch_tokens: Any
    """Rows of the projections, tokens without an adapter included."""
    prefill_tokens: Any
    seqs: Any
    tokens: Any
    """Number of tokens with an adapter."""
    adapters: Any
    """Number of different adapters."""
    rank: Any
    """Mean rank of these adapters, padding included."""


class Projection(NamedTuple):
    """A matrix of the model with adapters: k inputs, and the outputs of each fused slice."""

    k: int
    slices: tuple[int, ...]
    shrink_share: float = 1.0
    """Share of the ranks that shrink computes on this device."""

    @property
    def n(self) -> int:
        return sum(self.slices)


def num_launches(projection: Projection, family: LoraFamily) -> tuple[int, int]:
    """Returns the number of shrinks and expands, and of small kernels, per projection."""
    return 2 * (1 if family.fuses_slices else len(projection.slices)), family.fills


def projection_seconds(
    work: LoraWork,
    projection: Projection,
    kernels: LoraKernels,
    device: Device,
    curve: StreamCurve,
    element_bytes: float,
) -> Any:
    """Returns the GPU seconds of the kernels of one projection; without adapters, of empty kernels.

    One token, one adapter of rank 16, k = n = 4096, vllm with one slot on an H100: a tile of shrink moves
    (32 + 16) x 4096 x 2 / 64 + 4 x 32 x 16 = 8,192 bytes and takes 4.33 us, one of expand 64 x (512 + 64)
    + 4,096 = 40,960 bytes and 13.65 us. With 3 starts of 2 us, 262,144 bytes of weights (0.10 us) and 192
    blocks (0.17 us) that is 24.3 us.
    """
    family = kernels.family
    parts = [projection.slices] if family.fuses_slices else [(n,) for n in projection.slices]
    seconds: Any = 0.0
    for slices in parts:
        part = projection._replace(slices=slices)
        seconds = seconds + _pair_seconds(work, part, kernels, device, element_bytes)
    launched = sum(num_launches(projection, family))
    elements = projection.k * len(projection.slices) * projection.shrink_share + projection.n
    weight_bytes = work.adapters * work.rank * elements
    bandwidth = device.memory_bandwidth_bytes_per_s * curve.bandwidth_share
    return launched * curve.start_s + weight_bytes * element_bytes / bandwidth + seconds


def _pair_seconds(
    work: LoraWork, projection: Projection, kernels: LoraKernels, device: Device, b: float
) -> Any:
    """Returns the seconds of a shrink and an expand beyond their starts and the first read of the weights."""
    family = kernels.family
    seconds = _grids_seconds(family.grids, work, projection, kernels, device, b)
    if family.small is None:
        return seconds
    small_s = _grids_seconds(family.small, work, projection, kernels, device, b)
    if family.small_tokens is None:
        is_small = 1 - smaller(work.prefill_tokens, 1)
    else:
        is_small = smaller(larger(family.small_tokens + 1 - work.batch_tokens, 0), 1)
    return small_s * is_small + seconds * (1 - is_small)


def _grids_seconds(
    grids: Grids, work: LoraWork, projection: Projection, kernels: LoraKernels, device: Device, b: float
) -> Any:
    """Returns `_pair_seconds` of kernels with these grids."""
    k, slices, shrink_share = projection
    shrink, expand = grids
    rank = work.rank
    per_sm_s = OPERAND_BYTES_PER_SM_S * kernels.family.speed
    # Shrink: every row tile of every slice reads its rows and the ranks' columns of A, in `splits` parts.
    by_token = shrink.rows_of == "token"
    rank_tiles = 1.0 if by_token else larger(rank * shrink_share / shrink.columns, 1)
    columns = rank * shrink_share if by_token else shrink.columns
    tile_bytes = (shrink.rows + columns) * k * b / shrink.splits + 4 * shrink.rows * columns
    tiles = _row_tiles(shrink, work) * rank_tiles * (shrink.splits * len(slices))
    some = smaller(work.adapters, 1)
    one_tile_s = some * (TILE_START_S + RESIDENT_TILES * tile_bytes / per_sm_s)
    shrink_s = larger(one_tile_s, tiles * tile_bytes / per_sm_s / device.num_sms)
    blocks = _blocks(shrink, work, kernels) * rank_tiles * (shrink.splits * len(slices))
    # Expand: every tile reads and writes its outputs, and reads its columns of B and the shrunk rows.
    widths = [expand.columns if expand.splits == 1 else n / expand.splits for n in slices]
    counts = [-(-n // width) for n, width in zip(slices, widths, strict=True)]
    column_bytes = larger(b * rank, SECTOR_BYTES)
    each = [expand.rows * (2 * b * width + 4 * rank) + column_bytes * width for width in widths]
    row_tiles = _row_tiles(expand, work)
    moved: Any = 0.0
    for count, one in zip(counts, each, strict=True):
        moved = moved + count * one
    one_tile_s = some * (TILE_START_S + RESIDENT_TILES * each[0] / per_sm_s)
    expand_s = larger(one_tile_s, row_tiles * moved / per_sm_s / device.num_sms)
    has_slots = kernels.family.has_slot_grid
    outputs = max(counts) * len(slices) if has_slots else sum(counts)
    block_s = BLOCK_CYCLES / (device.sm_clock_hz or CLOCK_HZ)
    return shrink_s + expand_s + (blocks + _blocks(expand, work, kernels) * outputs) * block_s


def _row_tiles(grid: Grid, work: LoraWork) -> Any:
    """Returns the number of row tiles with tokens: one per segment, and one per further `rows` tokens."""
    if grid.rows_of == "token":
        return work.tokens
    segments = work.adapters if grid.rows_of == "adapter" else larger(work.seqs, work.adapters)
    segments = smaller(segments, larger(work.tokens, 1))
    return segments + (larger(work.tokens, segments) - segments) // grid.rows


def _blocks(grid: Grid, work: LoraWork, kernels: LoraKernels) -> Any:
    """Returns the row tiles that the grid launches, empty ones included."""
    if grid.rows_of == "token":
        return work.batch_tokens
    if not kernels.family.has_slot_grid:
        return _row_tiles(grid, work)
    slots = work.adapters
    if not kernels.specialize_active_lora and kernels.max_loras is not None:
        slots = kernels.max_loras
    return (slots + 1) * -(-work.batch_tokens // grid.rows)
