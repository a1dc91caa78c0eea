"""Parts shared by the GEMMs with quantised weights: launch tables, split-K and its sum, and the 8-bit kernel.

A decode step multiplies few rows by a whole weight matrix, so it is memory-bound, and its few tiles of
columns do not fill a chip. The reduction over K is therefore split into `num_splits` parts, each writes fp32
partial sums [num_splits, M, N], and `sum_splits` adds them in a fixed order, without atomics, so that results
are deterministic. While M <= 16 the number of splits does not depend on M, and the result of a row does not
depend on the other rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

import torch
import triton
import triton.language as tl

from kernels.launch import INTERPRETER, launch, target

T = TypeVar("T")

# Programs that fill a chip: two per multiprocessor.
PROGRAMS = {"sm_80": 216, "sm_90": 264, "gfx942": 608, INTERPRETER: 4}
# Smallest number of K-blocks per program that fills its pipeline of loads.
MIN_BLOCKS = {"sm_80": 4, "sm_90": 4, "gfx942": 4, INTERPRETER: 1}
MAX_SPLITS = 16
SUM_BLOCKS = 4  # K-blocks that take as long as the launch that adds the splits: about 2 us
# Arguments that change in every step, so that a kernel compiled for one step serves the next. (Triton
# specialises m = 1, for which the engine has a graph of its own.)
STEP_ARGS = ["m", "blocks_per_split"]
SUM_TILE = 1024


class Tile(NamedTuple):
    """Launch parameters: a program computes [rows, cols] of the output, `depth` of K at a time."""

    rows: int
    cols: int
    depth: int
    num_warps: int
    num_stages: int


def for_target(table: Mapping[str, T], name: str | None = None) -> T:
    """Returns the table's entry for a chip (None: the target of launches), or for the nearest older one."""
    name = name or target()
    if name in table:
        return table[name]
    if name.startswith("sm_"):
        return table["sm_90" if int(name[3:]) >= 90 else "sm_80"]
    return table["gfx942" if name.startswith("gfx") else INTERPRETER]


def for_rows(tiles: Mapping[int, Tile], num_rows: int) -> Tile:
    """Returns the tile of the smallest key that is at least num_rows, else of the largest key."""
    return next((tile for limit, tile in tiles.items() if num_rows <= limit), list(tiles.values())[-1])


def parts_of_k(num_tiles: int, num_k_blocks: int, num_splits: int | None) -> tuple[int, int]:
    """Returns the number of splits of K, and the K-blocks of each but the last.

    num_splits None: as many as fill the chip.
    """
    if num_splits is None:
        num_splits = splits_of_k(num_tiles, num_k_blocks)
    blocks_per_split = triton.cdiv(num_k_blocks, max(num_splits, 1))
    return triton.cdiv(num_k_blocks, blocks_per_split), blocks_per_split


def splits_of_k(num_tiles: int, num_k_blocks: int) -> int:
    """Returns the number of splits of K with which the last program ends first.

    Programs run in waves that fill the chip, each as long as the K-blocks of a program. So a number of splits
    whose programs are a few more than fit costs a wave: qkv of an 8B model on an H200 (48 tiles, 32 blocks)
    takes 7 blocks with 5 splits, 12 with 6.
    """
    most = min(max(num_k_blocks // for_target(MIN_BLOCKS), 1), MAX_SPLITS)

    def cost(splits: int) -> int:
        blocks = triton.cdiv(num_k_blocks, splits)
        programs = max(num_tiles, 1) * triton.cdiv(num_k_blocks, blocks)
        return triton.cdiv(programs, for_target(PROGRAMS)) * blocks + (SUM_BLOCKS if splits > 1 else 0)

    splits = min(range(1, most + 1), key=cost)
    return triton.cdiv(num_k_blocks, triton.cdiv(num_k_blocks, splits))  # no split is empty


def sum_splits(partial_SMN: torch.Tensor, bias_N: torch.Tensor | None, out_MN: torch.Tensor) -> None:
    """Writes the sum of fp32 partial_SMN over S, in order, plus the bias to out, in out's dtype."""
    num_splits, m, n = partial_SMN.shape
    launch(
        sum_splits_kernel,
        (triton.cdiv(m * n, SUM_TILE),),
        partial_SMN,
        bias_N if bias_N is not None else partial_SMN,
        out_MN,
        m * n,
        n,
        NUM_SPLITS=num_splits,
        HAS_BIAS=bias_N is not None,
        TILE=SUM_TILE,
        num_warps=4,
    )


def scaled_gemm(
    x_MK: torch.Tensor,
    weight_NK: torch.Tensor,
    row_scales_M: torch.Tensor | None,
    scales_N: torch.Tensor,
    bias_N: torch.Tensor | None,
    out_dtype: torch.dtype,
    tiles: Mapping[int, Tile],
    num_splits: int | None,
) -> torch.Tensor:
    """Returns (x @ weight^T) * row_scales * scales + bias [M, N]; 8-bit weights are converted to x's dtype.

    x is bf16, fp16, or of the weight's own type (the product of int8 by int8 sums in int32). Callers check
    the arguments.
    """
    (m, k), n = x_MK.shape, weight_NK.shape[0]
    out_MN = torch.empty(m, n, dtype=out_dtype, device=x_MK.device)
    if m == 0 or n == 0:
        return out_MN
    tile = for_rows(tiles, m)
    grid_m, grid_n = triton.cdiv(m, tile.rows), triton.cdiv(n, tile.cols)
    num_k_blocks = triton.cdiv(k, tile.depth)
    num_splits, blocks_per_split = parts_of_k(grid_m * grid_n, num_k_blocks, num_splits)
    split = num_splits > 1
    sums = torch.empty(num_splits, m, n, dtype=torch.float32, device=x_MK.device) if split else out_MN
    launch(
        scaled_gemm_kernel,
        (grid_m * grid_n, num_splits),
        x_MK,
        weight_NK,
        row_scales_M if row_scales_M is not None else scales_N,
        scales_N,
        bias_N if bias_N is not None else scales_N,
        sums,
        m,
        n,
        k,
        x_MK.stride(0),
        blocks_per_split,
        HAS_ROW_SCALES=row_scales_M is not None,
        HAS_BIAS=bias_N is not None and not split,
        ROWS=tile.rows,
        COLS=tile.cols,
        DEPTH=tile.depth,
        GROUP=8,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split:
        sum_splits(sums, bias_N, out_MN)
    return out_MN


def check_gemm(
    x_MK: torch.Tensor,
    num_in: int,
    num_out: int,
    bias_N: torch.Tensor | None,
    dtypes: tuple[torch.dtype, ...],
) -> None:
    """Raises ValueError unless x is [M, num_in] of one of `dtypes` with contiguous rows, bias [num_out]."""
    if x_MK.dtype not in dtypes:
        raise ValueError(f"x is {x_MK.dtype}; must be one of {', '.join(map(str, dtypes))}")
    if x_MK.dim() != 2 or x_MK.shape[1] != num_in:
        raise ValueError(f"x is {list(x_MK.shape)}; must be [M, {num_in}] for this weight")
    if x_MK.stride(1) != 1:
        raise ValueError("x: rows must be contiguous")
    if bias_N is not None and bias_N.shape != (num_out,):
        raise ValueError(f"bias is {list(bias_N.shape)}; must be [{num_out}] for this weight")


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns random numbers on a GPU, where cases are timed; uninitialised memory on a CPU."""
    if device.type == "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    if dtype in (torch.int8, torch.uint8, torch.int32):
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, shape, dtype=dtype, device=device)
    if dtype.itemsize == 1:  # torch has no random numbers in fp8
        return torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype)
    return torch.randn(shape, dtype=dtype, device=device)


@triton.jit
def swizzled(pid, grid_m, grid_n, GROUP: tl.constexpr):
    """Maps program id to (row tile, column tile), GROUP row tiles at a time, to keep both operands in L2."""
    per_group = GROUP * grid_n
    first_m = pid // per_group * GROUP
    rows_here = tl.minimum(grid_m - first_m, GROUP)
    return first_m + (pid % per_group) % rows_here, (pid % per_group) // rows_here


@triton.jit(do_not_specialize_on_alignment=STEP_ARGS)
def scaled_gemm_kernel(
    x_ptr,
    weight_ptr,
    row_scales_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    m,
    n,
    k,
    stride_xm,
    blocks_per_split,
    HAS_ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Computes a [ROWS, COLS] tile of (x @ weight.T) * scales + bias, or one split of its depth."""
    pid_m, pid_n = swizzled(tl.program_id(0), tl.cdiv(m, ROWS), tl.cdiv(n, COLS), GROUP)
    split = tl.program_id(1)
    o_m = pid_m * ROWS + tl.arange(0, ROWS)
    o_n = pid_n * COLS + tl.arange(0, COLS)
    o_k = tl.arange(0, DEPTH)
    m_m = o_m < m
    m_n = o_n < n
    p_x = x_ptr + o_m[:, None].to(tl.int64) * stride_xm
    p_w = weight_ptr + o_n[None, :].to(tl.int64) * k
    INTEGER: tl.constexpr = x_ptr.dtype.element_ty == tl.int8
    b_acc = tl.zeros([ROWS, COLS], dtype=tl.int32 if INTEGER else tl.float32)
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, tl.cdiv(k, DEPTH))
    for block in range(first, last):
        at = block * DEPTH + o_k
        b_x = tl.load(p_x + at[None, :], mask=m_m[:, None] & (at < k)[None, :], other=0.0)  # [ROWS, DEPTH]
        b_w = tl.load(p_w + at[:, None], mask=(at < k)[:, None] & m_n[None, :], other=0.0)  # [DEPTH, COLS]
        if x_ptr.dtype.element_ty == tl.float8e4nv:  # Hopper sums fp8 in 14 bits; added in fp32 every DEPTH
            b_acc = tl.dot(b_x, b_w, b_acc, max_num_imprecise_acc=DEPTH)
        else:
            b_acc = tl.dot(b_x, b_w.to(b_x.dtype), b_acc, out_dtype=b_acc.dtype)
    b_out = b_acc.to(tl.float32) * tl.load(scales_ptr + o_n, mask=m_n, other=0)[None, :]
    if HAS_ROW_SCALES:
        b_out *= tl.load(row_scales_ptr + o_m, mask=m_m, other=0)[:, None]
    if HAS_BIAS:
        b_out += tl.load(bias_ptr + o_n, mask=m_n, other=0).to(tl.float32)[None, :]
    p_out = out_ptr + (split.to(tl.int64) * m + o_m[:, None]) * n + o_n[None, :]
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def sum_splits_kernel(
    partial_ptr,
    bias_ptr,
    out_ptr,
    numel,
    n,
    NUM_SPLITS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sums the partial products of all splits, and adds the bias."""
    o = tl.program_id(0) * TILE + tl.arange(0, TILE)  # [TILE]
    mask = o < numel
    b_sum = tl.zeros([TILE], dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        b_sum += tl.load(partial_ptr + split * numel + o, mask=mask, other=0)
    if HAS_BIAS:
        b_sum += tl.load(bias_ptr + o % n, mask=mask, other=0).to(tl.float32)
    tl.store(out_ptr + o, b_sum.to(out_ptr.dtype.element_ty), mask=mask)
