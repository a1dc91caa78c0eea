"""GEMM of 16-bit activations by 4-bit weights in groups with scale and zero point (AWQ and GPTQ).

The weight's layout is described in `kernels.int4_weight`. Letters: M rows (tokens), N outputs, K inputs, B
blocks of 128 inputs, G groups of 32, 64 or 128 inputs.

One tile of words [16, N-tile] is the right operand of eight dots of depth 16. Each thread reads 16 bytes at
once, and one shift and one mask extract two weights from a word. A nibble q becomes a float without a
conversion: in the low bits of 128 (bf16) or 1024 (fp16) it gives exactly 128 + q or 1024 + q. The dot of
these numbers is corrected once per group: y += scale * (x . (128 + q) - (128 + zero) * sum(x)), in fp32, so
weights are never rounded.

The kernel moves N*K/2 + 3*N*G bytes of weights and 2*M*(K + N) of activations and computes 2*M*N*K FLOPs: it
is memory-bound up to about M = 32. From DENSE_ROWS rows on, the weight is converted to 16 bits and multiplied
by cuBLAS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.case import Case
from kernels.gemm import (
    STEP_ARGS,
    Tile,
    check_gemm,
    for_rows,
    for_target,
    parts_of_k,
    random_tensor,
    sum_splits,
    swizzled,
)
from kernels.int4_weight import BLOCK, RUN, Int4Weight, check_layout, dense_reference
from kernels.launch import INTERPRETER, launch

DTYPES = (torch.bfloat16, torch.float16)
DENSE_ROWS = 256
# Tile by target and by the largest M for which it is used; the depth is always a block. With few rows,
# unpacking takes as long as reading, and each warp reads its part of x once for all its columns. On sm_90 the
# loop has 7.0 instructions per weight with 64 columns, 4.8 with 128.
TILES = {
    "sm_80": {
        16: Tile(16, 128, BLOCK, 4, 4),
        64: Tile(64, 64, BLOCK, 4, 3),
        1 << 30: Tile(64, 128, BLOCK, 8, 3),
    },
    "sm_90": {
        16: Tile(16, 128, BLOCK, 4, 4),
        64: Tile(64, 64, BLOCK, 4, 4),
        1 << 30: Tile(64, 128, BLOCK, 8, 4),
    },
    "gfx942": {
        16: Tile(16, 64, BLOCK, 4, 2),
        64: Tile(64, 64, BLOCK, 4, 2),
        1 << 30: Tile(64, 128, BLOCK, 8, 2),
    },
    INTERPRETER: {
        16: Tile(16, 32, BLOCK, 4, 1),
        64: Tile(32, 32, BLOCK, 4, 1),
        1 << 30: Tile(64, 32, BLOCK, 4, 1),
    },
}
DENSE_COLS = 64


def w4a16_gemm(
    x_MK: torch.Tensor,
    weight: Int4Weight,
    bias_N: torch.Tensor | None = None,
    *,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Returns x @ weight^T + bias: [M, N] in x's dtype.

    x_MK: bf16 or fp16 [M, K], any row stride. bias_N: [N], any float type. num_splits: parts of K that are
    summed separately; None: as many as fill the chip. Raises ValueError for other dtypes, shapes that do not
    match, and group sizes other than 32, 64 and 128.
    """
    words_BNI, scales_GN, zeros_GN, num_inputs, group_size, order_K = weight
    num_blocks, n, _ = words_BNI.shape
    check_gemm(x_MK, num_inputs, n, bias_N, DTYPES)
    check_layout(weight)
    m = len(x_MK)
    if m >= DENSE_ROWS and num_splits is None:
        if order_K is not None:
            x_MK = x_MK[:, order_K]
        return F.linear(x_MK, dense(weight, x_MK.dtype), None if bias_N is None else bias_N.to(x_MK.dtype))
    out_MN = torch.empty(m, n, dtype=x_MK.dtype, device=x_MK.device)
    if m == 0 or n == 0:
        return out_MN
    if order_K is not None:
        x_MK = x_MK[:, order_K]
    tile = for_rows(for_target(TILES), m)
    grid_m, grid_n = triton.cdiv(m, tile.rows), triton.cdiv(n, tile.cols)
    num_splits, blocks_per_split = parts_of_k(grid_m * grid_n, num_blocks, num_splits)
    split = num_splits > 1
    sums = torch.empty(num_splits, m, n, dtype=torch.float32, device=x_MK.device) if split else out_MN
    launch(
        w4a16_kernel,
        (grid_m * grid_n, num_splits),
        x_MK,
        words_BNI,
        scales_GN,
        zeros_GN,
        bias_N if bias_N is not None else scales_GN,
        sums,
        m,
        n,
        num_inputs,
        num_blocks,
        x_MK.stride(0),
        blocks_per_split,
        GROUP_SIZE=group_size,
        HAS_BIAS=bias_N is not None and not split,
        ROWS=tile.rows,
        COLS=tile.cols,
        GROUP=8,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if split:
        sum_splits(sums, bias_N, out_MN)
    return out_MN


def w4a16_gemm_reference(
    x_MK: torch.Tensor, weight: Int4Weight, bias_N: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes the reference of `w4a16_gemm` in torch, in fp32 throughout; x may also be fp32."""
    x = x_MK.float() if weight.order_K is None else x_MK[:, weight.order_K].float()
    out = x @ dense_reference(weight, torch.float32).T
    return (out if bias_N is None else out + bias_N.float()).to(x_MK.dtype)


def dense(weight: Int4Weight, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight [N, K] in bf16 or fp16, inputs in the weight's own order.

    Raises ValueError like w4a16_gemm.
    """
    if dtype not in DTYPES:
        raise ValueError(f"{dtype}: must be one of {', '.join(map(str, DTYPES))}")
    check_layout(weight)
    num_blocks, n, _ = weight.words_BNI.shape
    out_NK = torch.empty(n, weight.num_inputs, dtype=dtype, device=weight.words_BNI.device)
    launch(
        dense_kernel,
        (num_blocks, triton.cdiv(n, DENSE_COLS)),
        weight.words_BNI,
        weight.scales_GN,
        weight.zeros_GN,
        out_NK,
        n,
        weight.num_inputs,
        GROUP_SIZE=weight.group_size,
        COLS=DENSE_COLS,
        num_warps=4,
    )
    return out_NK


def cases() -> Iterator[Case]:
    """Yields Llama-3.1-8B's layers, SmolLM2-135M's down projection, groups of 32 and 64, dense weights."""
    layers = (
        ("8b_qkv", 6144, 4096, 128),
        ("8b_gate_up", 28672, 4096, 128),
        ("8b_down", 4096, 14336, 128),
        ("8b_o_g32", 4096, 4096, 32),
        ("smollm2_down_g64", 576, 1536, 64),
    )
    for name, n, k, group_size in layers:
        for m in (1, 16, 64, 128):
            for dtype in DTYPES if (name, m) == ("8b_qkv", 16) else DTYPES[:1]:
                yield w4a16_case(name, n, k, group_size, m, dtype)
        moved = n * k / 2 + 3 * n * k / group_size + 2 * n * k
        yield Case(f"dense_{name}", partial(_dense_case, n, k, group_size), moved, 2 * n * k)


def w4a16_case(layer: str, n: int, k: int, group_size: int, m: int, dtype: torch.dtype) -> Case:
    """Returns the case of the product of x [m, k] and a 4-bit weight [n, k]."""
    return Case(
        f"{layer}_m{m}_{dtype}".replace("torch.", ""),
        partial(_gemm_case, m, n, k, group_size, dtype),
        n * k / 2 + 3 * n * k / group_size + 2 * m * (k + n),
        2 * m * n * k,
    )


def _random_weight(n: int, k: int, group_size: int, device: torch.device) -> Int4Weight:
    groups = -(-k // BLOCK) * BLOCK // group_size
    return Int4Weight(
        random_tensor((-(-k // BLOCK), n, RUN), torch.int32, device),
        random_tensor((groups, n), torch.float16, device),
        random_tensor((groups, n), torch.uint8, device),
        k,
        group_size,
    )


def _gemm_case(
    m: int, n: int, k: int, group_size: int, dtype: torch.dtype, device: torch.device
) -> Callable[[], object]:
    x_MK, weight = random_tensor((m, k), dtype, device), _random_weight(n, k, group_size, device)
    return lambda: w4a16_gemm(x_MK, weight)


def _dense_case(n: int, k: int, group_size: int, device: torch.device) -> Callable[[], object]:
    weight = _random_weight(n, k, group_size, device)
    return lambda: dense(weight, torch.bfloat16)


@triton.jit
def nibbles_as_floats(b_words, RUN_INDEX: tl.constexpr, DTYPE: tl.constexpr):
    """Returns run RUN_INDEX of a tile of words as 128 + nibble in bf16, or 1024 + nibble in fp16."""
    MAGIC: tl.constexpr = 0x43004300 if tl.bfloat16 == DTYPE else 0x64006400
    b_pairs = ((b_words >> (RUN_INDEX // 2 * 4)) & 0x000F000F) | MAGIC
    return (b_pairs >> (RUN_INDEX % 2 * 16)).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=STEP_ARGS)
def w4a16_kernel(
    x_ptr,
    words_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    m,
    n,
    k,
    num_blocks,
    stride_xm,
    blocks_per_split,
    GROUP_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Computes a [ROWS, COLS] tile of x @ weight.T + bias from 4-bit weights, or one split of its depth."""
    pid_m, pid_n = swizzled(tl.program_id(0), tl.cdiv(m, ROWS), tl.cdiv(n, COLS), GROUP)
    split = tl.program_id(1)
    o_m = pid_m * ROWS + tl.arange(0, ROWS)
    o_n = pid_n * COLS + tl.arange(0, COLS)
    o_i = tl.arange(0, 16)
    m_m = o_m < m
    m_n = o_n < n
    GROUPS: tl.constexpr = 128 // GROUP_SIZE
    RUNS: tl.constexpr = GROUP_SIZE // 16
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    OFFSET: tl.constexpr = 128.0 if tl.bfloat16 == DTYPE else 1024.0
    p_x = x_ptr + o_m[:, None].to(tl.int64) * stride_xm + o_i[None, :]
    b_acc = tl.zeros([ROWS, COLS], dtype=tl.float32)
    first = split * blocks_per_split
    last = tl.minimum(first + blocks_per_split, num_blocks)
    for block in range(first, last):
        p_words = words_ptr + (block * n + o_n[None, :].to(tl.int64)) * 16 + o_i[:, None]
        b_words = tl.load(p_words, mask=m_n[None, :], other=0)  # [16, COLS]
        for group in tl.static_range(GROUPS):
            b_dot = tl.zeros([ROWS, COLS], dtype=tl.float32)
            b_x_sums = tl.zeros([ROWS, 16], dtype=tl.float32)
            for run in tl.static_range(RUNS):
                o_k = block * 128 + (group * RUNS + run) * 16
                # k is a multiple of 16: a run is inside or outside as a whole
                b_x = tl.load(p_x + o_k, mask=m_m[:, None] & (o_k < k), other=0)  # [ROWS, 16]
                b_w = nibbles_as_floats(b_words, group * RUNS + run, DTYPE)  # [16, COLS]
                b_dot = tl.dot(b_x, b_w, b_dot)
                b_x_sums += b_x.to(tl.float32)
            o_g = (block * GROUPS + group) * n + o_n
            b_scale = tl.load(scales_ptr + o_g, mask=m_n, other=0).to(tl.float32)
            b_zero = tl.load(zeros_ptr + o_g, mask=m_n, other=0).to(tl.float32) + OFFSET
            b_acc += b_scale[None, :] * (b_dot - b_zero[None, :] * tl.sum(b_x_sums, 1)[:, None])
    if HAS_BIAS:
        b_acc += tl.load(bias_ptr + o_n, mask=m_n, other=0).to(tl.float32)[None, :]
    p_out = out_ptr + (split.to(tl.int64) * m + o_m[:, None]) * n + o_n[None, :]
    tl.store(p_out, b_acc.to(out_ptr.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def dense_kernel(
    words_ptr, scales_ptr, zeros_ptr, out_ptr, n, k, GROUP_SIZE: tl.constexpr, COLS: tl.constexpr
):
    """Unpacks COLS columns of one 128-deep block of 4-bit weights."""
    block = tl.program_id(0)
    o_n = tl.program_id(1) * COLS + tl.arange(0, COLS)
    o_i = tl.arange(0, 16)
    m_n = o_n < n
    p_words = words_ptr + (block.to(tl.int64) * n + o_n[:, None]) * 16 + o_i[None, :]
    b_words = tl.load(p_words, mask=m_n[:, None], other=0)  # [COLS, 16]
    for run in tl.static_range(8):
        o_g = (block * (128 // GROUP_SIZE) + run * 16 // GROUP_SIZE).to(tl.int64) * n + o_n
        b_scale = tl.load(scales_ptr + o_g, mask=m_n, other=0).to(tl.float32)
        b_zero = tl.load(zeros_ptr + o_g, mask=m_n, other=0).to(tl.float32)
        b_nibbles = (b_words >> (run // 2 * 4 + run % 2 * 16)) & 0xF
        b_w = (b_nibbles.to(tl.float32) - b_zero[:, None]) * b_scale[:, None]
        o_k = block * 128 + run * 16 + o_i
        p_out = out_ptr + o_n[:, None].to(tl.int64) * k + o_k[None, :]
        tl.store(p_out, b_w.to(out_ptr.dtype.element_ty), mask=m_n[:, None] & (o_k < k)[None, :])
