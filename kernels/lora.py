"""Low-rank adapters for a batch that mixes them: out += scaling * (x @ A^T) @ B^T, by each token's adapter.

Chen et al., Punica (MLSys 2024): segmented shrink and expand (SGMV; with one token a segment, BGMV). Tokens
are sorted by adapter; segment s holds the tokens segment_starts[s] .. segment_starts[s + 1] and uses the
adapter segment_adapters[s], -1 for none. Segments may be empty, so a captured graph keeps one number of
segments. Rows before the first start and from the last start on belong to no segment.

A fused projection (queries, keys and values) has a slice for each: the slices' A are stacked along the ranks
and their B along the outputs, so that it takes one shrink and one expand too.

Letters: T tokens, S segments, L resident adapters, R ranks of a slice (padded with zeros to the largest),
Z ranks of all slices, K inputs, N outputs of all slices, P parts of K. Each adapter that has tokens is read
once for up to `rows` of them: memory bounds both kernels at decode, with 2 (Z K + R N) bytes an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.case import Case
from kernels.gemm import for_target, random_tensor
from kernels.launch import INTERPRETER, launch

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_RANK = 64  # of one slice
MAX_SLICES = 3


# Arguments that change from step to step: a kernel compiled for one step must serve the next.
STEP_ARGS = ["num_tokens", "starts_ptr", "adapters_ptr"]


class LoraTiles(NamedTuple):
    """rows: tokens of a program. ranks, depth (of K), num_parts (of K): the shrink's. cols: the expand's."""

    rows: int
    ranks: int
    depth: int
    cols: int
    num_parts: int
    num_warps: int
    num_stages: int


# By target, and by the most tokens in a segment.
TILES = {
    "sm_80": {16: LoraTiles(16, 32, 128, 128, 8, 4, 3), 1 << 30: LoraTiles(64, 32, 64, 128, 2, 4, 3)},
    "sm_90": {16: LoraTiles(16, 32, 256, 128, 8, 4, 3), 1 << 30: LoraTiles(64, 32, 128, 128, 2, 4, 3)},
    "gfx942": {16: LoraTiles(16, 32, 128, 128, 8, 4, 2), 1 << 30: LoraTiles(64, 32, 64, 128, 2, 4, 2)},
    INTERPRETER: {16: LoraTiles(16, 16, 32, 32, 2, 4, 1), 1 << 30: LoraTiles(32, 16, 32, 32, 1, 4, 1)},
}


def lora_shrink(
    x_TK: torch.Tensor,
    a_LZK: torch.Tensor,
    segment_starts: torch.Tensor,
    segment_adapters: torch.Tensor,
    *,
    max_segment_tokens: int | None = None,
) -> torch.Tensor:
    """x @ A^T of each token's adapter, as fp32 parts [P, T, Z] whose sum over P it is (lora_expand adds
    them).

    x_TK: bf16, fp16 or fp32, any row stride. a_LZK: of x's dtype, each adapter's contiguous, K a multiple of
    16. segment_starts: int32 [S + 1]. segment_adapters: int32 [S]. max_segment_tokens: no segment has more;
    default T. Tokens without an adapter get zeros; tokens of no segment are not written. Raises ValueError on
    other dtypes and shapes.
    """
    num_tokens, k = x_TK.shape
    _check(x_TK, a_LZK, segment_starts, segment_adapters)
    if a_LZK.shape[2] != k or k % 16:
        raise ValueError(f"A takes {a_LZK.shape[2]} inputs, x has {k}; supported: the same multiple of 16")
    rank = a_LZK.shape[1]
    most = num_tokens if max_segment_tokens is None else max_segment_tokens
    tiles = _tiles(most, x_TK.dtype)
    num_parts = min(tiles.num_parts, triton.cdiv(k, tiles.depth))
    parts_PTZ = torch.empty(num_parts, num_tokens, rank, dtype=torch.float32, device=x_TK.device)
    rank_tile = min(tiles.ranks, max(16, triton.next_power_of_2(rank)))
    launch(
        lora_shrink_kernel,
        (triton.cdiv(most, tiles.rows), len(segment_adapters), num_parts * triton.cdiv(rank, rank_tile)),
        x_TK,
        a_LZK,
        segment_starts,
        segment_adapters,
        parts_PTZ,
        num_tokens,
        k,
        rank,
        x_TK.stride(0),
        a_LZK.stride(0),
        num_parts,
        triton.cdiv(triton.cdiv(k, tiles.depth), num_parts),
        ROWS=tiles.rows,
        RANKS=rank_tile,
        DEPTH=tiles.depth,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return parts_PTZ


def lora_shrink_reference(
    x_TK: torch.Tensor,
    a_LZK: torch.Tensor,
    segment_starts: torch.Tensor,
    segment_adapters: torch.Tensor,
    *,
    max_segment_tokens: int | None = None,
) -> torch.Tensor:
    """As lora_shrink, in one part; tokens of no segment get zeros."""
    parts_PTZ = torch.zeros(1, x_TK.shape[0], a_LZK.shape[1], dtype=torch.float32, device=x_TK.device)
    for start, end, adapter in _segments(segment_starts, segment_adapters):
        parts_PTZ[0, start:end] = x_TK[start:end].float() @ a_LZK[adapter].float().T
    return parts_PTZ


def lora_expand(
    parts_PTZ: torch.Tensor,
    b_LNR: torch.Tensor,
    scaling_L: torch.Tensor,
    segment_starts: torch.Tensor,
    segment_adapters: torch.Tensor,
    out_TN: torch.Tensor,
    *,
    slices: Sequence[int] | None = None,
    max_segment_tokens: int | None = None,
) -> None:
    """Add to out, in place: scaling * (sum of parts) @ B^T, each slice's outputs from its own ranks.

    parts_PTZ: fp32 of lora_shrink. b_LNR: bf16, fp16 or fp32, each adapter's contiguous, R <= 64; the summed
    parts are rounded to its dtype. scaling_L: fp32. out_TN: bf16, fp16 or fp32, any row stride. slices:
    outputs of each, up to 3; default one of N. Slice s has the ranks s R .. (s + 1) R of Z. Tokens without an
    adapter are left as they are. Raises ValueError on other dtypes and shapes.
    """
    num_parts, num_tokens, stacked = parts_PTZ.shape
    _, num_out, rank = b_LNR.shape
    slices = [num_out] if slices is None else list(slices)
    _check_expand(parts_PTZ, b_LNR, scaling_L, out_TN, slices)
    _check_segments(segment_starts, segment_adapters)
    first, second, third = [*slices, 0, 0][:MAX_SLICES]
    most = num_tokens if max_segment_tokens is None else max_segment_tokens
    tiles = _tiles(most, b_LNR.dtype)
    launch(
        lora_expand_kernel,
        (
            triton.cdiv(most, tiles.rows),
            len(segment_adapters),
            sum(triton.cdiv(width, tiles.cols) for width in slices),
        ),
        parts_PTZ,
        b_LNR,
        scaling_L,
        segment_starts,
        segment_adapters,
        out_TN,
        num_tokens,
        stacked,
        first,
        second,
        third,
        rank,
        b_LNR.stride(0),
        out_TN.stride(0),
        NUM_PARTS=num_parts,
        ROWS=tiles.rows,
        RANKS=max(16, triton.next_power_of_2(rank)),
        COLS=tiles.cols,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def lora_expand_reference(
    parts_PTZ: torch.Tensor,
    b_LNR: torch.Tensor,
    scaling_L: torch.Tensor,
    segment_starts: torch.Tensor,
    segment_adapters: torch.Tensor,
    out_TN: torch.Tensor,
    *,
    slices: Sequence[int] | None = None,
    max_segment_tokens: int | None = None,
) -> None:
    """As lora_expand, in place too."""
    _, num_out, rank = b_LNR.shape
    slices = [num_out] if slices is None else list(slices)
    shrunk_TZ = parts_PTZ.sum(0).to(b_LNR.dtype).float()
    scalings = scaling_L.tolist()
    for start, end, adapter in _segments(segment_starts, segment_adapters):
        ranks_of = shrunk_TZ[start:end].split(rank, dim=1)
        outputs_of = out_TN[start:end].split(slices, dim=1)
        for ranks, outputs, b_NR in zip(ranks_of, outputs_of, b_LNR[adapter].split(slices), strict=True):
            outputs.copy_(torch.addmm(outputs.float(), ranks, b_NR.float().T, alpha=scalings[adapter]))


def _segments(segment_starts: torch.Tensor, segment_adapters: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(first token, token behind the last, adapter) of the segments that have tokens and an adapter."""
    starts = segment_starts.tolist()
    for start, end, adapter in zip(starts[:-1], starts[1:], segment_adapters.tolist(), strict=True):
        if adapter >= 0 and end > start:
            yield start, end, adapter


def _tiles(max_segment_tokens: int, dtype: torch.dtype) -> LoraTiles:
    table = for_target(TILES)
    few = max_segment_tokens <= 16 or dtype == torch.float32  # of which the large tile spills registers
    return table[16] if few else table[1 << 30]


def _check(
    x_TK: torch.Tensor, a_LZK: torch.Tensor, segment_starts: torch.Tensor, segment_adapters: torch.Tensor
) -> None:
    if x_TK.dtype not in DTYPES or a_LZK.dtype != x_TK.dtype:
        raise ValueError(
            f"x is {x_TK.dtype}, A {a_LZK.dtype}; supported: both the same of {', '.join(map(str, DTYPES))}"
        )
    if x_TK.stride(1) != 1 or not a_LZK[0].is_contiguous():
        raise ValueError("the rows of x, and each adapter's A, must be contiguous")
    _check_segments(segment_starts, segment_adapters)


def _check_segments(segment_starts: torch.Tensor, segment_adapters: torch.Tensor) -> None:
    if segment_starts.dtype != torch.int32 or segment_adapters.dtype != torch.int32:
        raise ValueError("segment_starts and segment_adapters must be torch.int32")
    if len(segment_starts) != len(segment_adapters) + 1:
        raise ValueError(f"{len(segment_adapters)} segments need {len(segment_adapters) + 1} segment_starts")


def _check_expand(
    parts_PTZ: torch.Tensor,
    b_LNR: torch.Tensor,
    scaling_L: torch.Tensor,
    out_TN: torch.Tensor,
    slices: Sequence[int],
) -> None:
    num_adapters, num_out, rank = b_LNR.shape
    if b_LNR.dtype not in DTYPES or not b_LNR[0].is_contiguous():
        raise ValueError(
            f"B is {b_LNR.dtype}; supported: {', '.join(map(str, DTYPES))}, each adapter's contiguous"
        )
    if rank > MAX_RANK:
        raise ValueError(f"rank {rank} is not supported; supported: up to {MAX_RANK}")
    if parts_PTZ.dtype != torch.float32 or not parts_PTZ.is_contiguous():
        raise ValueError("parts must be contiguous torch.float32, as lora_shrink returns them")
    if scaling_L.dtype != torch.float32 or scaling_L.shape != (num_adapters,):
        raise ValueError(
            f"scaling is {scaling_L.dtype} {list(scaling_L.shape)}; needed: fp32 [{num_adapters}]"
        )
    if out_TN.shape != (parts_PTZ.shape[1], num_out) or out_TN.stride(1) != 1:
        needed = [parts_PTZ.shape[1], num_out]
        raise ValueError(f"out is {list(out_TN.shape)}; needed: {needed}, its rows contiguous")
    if not 1 <= len(slices) <= MAX_SLICES or sum(slices) != num_out:
        raise ValueError(f"slices={list(slices)}: must be up to {MAX_SLICES} that sum to {num_out} outputs")
    if len(slices) * rank != parts_PTZ.shape[2]:
        raise ValueError(f"parts have {parts_PTZ.shape[2]} ranks; {len(slices)} slices of {rank} need others")


def cases() -> Iterator[Case]:
    """Llama-3.1-8B's fused qkv (three slices stacked) and down projection, several adapters and ranks."""
    layers = (
        ("qkv_r16", 4096, (4096, 1024, 1024), 16),
        ("qkv_r64", 4096, (4096, 1024, 1024), 64),
        ("down_r8", 14336, (4096,), 8),
    )
    for name, k, slices, rank in layers:
        n, stacked = sum(slices), len(slices) * rank
        for num_tokens, num_segments in ((8, 8), (64, 16), (2048, 4)):
            adapters = num_segments
            shape = (num_tokens, num_segments, k, slices, rank)
            shrink_bytes = 2 * adapters * stacked * k + 2 * num_tokens * k + 4 * num_tokens * stacked
            expand_bytes = 2 * adapters * rank * n + 4 * num_tokens * n + 4 * num_tokens * stacked
            yield Case(
                f"shrink_{name}_t{num_tokens}",
                partial(_shrink_case, *shape),
                shrink_bytes,
                2 * num_tokens * stacked * k,
            )
            yield Case(
                f"expand_{name}_t{num_tokens}",
                partial(_expand_case, *shape),
                expand_bytes,
                2 * num_tokens * rank * n,
            )


def _even_segments(
    num_tokens: int, num_segments: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, int]:
    each = num_tokens // num_segments
    starts = torch.arange(num_segments + 1, dtype=torch.int32, device=device) * each
    return starts, torch.arange(num_segments, dtype=torch.int32, device=device), each


def _shrink_case(
    num_tokens: int, num_segments: int, k: int, slices: tuple[int, ...], rank: int, device: torch.device
) -> Callable[[], object]:
    x_TK = random_tensor((num_tokens, k), torch.bfloat16, device)
    a_LZK = random_tensor((num_segments, len(slices) * rank, k), torch.bfloat16, device)
    starts, adapters, most = _even_segments(num_tokens, num_segments, device)
    return lambda: lora_shrink(x_TK, a_LZK, starts, adapters, max_segment_tokens=most)


def _expand_case(
    num_tokens: int, num_segments: int, k: int, slices: tuple[int, ...], rank: int, device: torch.device
) -> Callable[[], object]:
    starts, adapters, most = _even_segments(num_tokens, num_segments, device)
    tiles = _tiles(most, torch.bfloat16)
    num_parts = min(tiles.num_parts, triton.cdiv(k, tiles.depth))
    parts_PTZ = random_tensor((num_parts, num_tokens, len(slices) * rank), torch.float32, device)
    b_LNR = random_tensor((num_segments, sum(slices), rank), torch.bfloat16, device)
    scaling_L = random_tensor((num_segments,), torch.float32, device)
    out_TN = random_tensor((num_tokens, sum(slices)), torch.bfloat16, device)
    return lambda: lora_expand(
        parts_PTZ, b_LNR, scaling_L, starts, adapters, out_TN, slices=slices, max_segment_tokens=most
    )


@triton.jit(do_not_specialize=STEP_ARGS, do_not_specialize_on_alignment=STEP_ARGS)
def lora_shrink_kernel(
    x_ptr,
    a_ptr,
    starts_ptr,
    adapters_ptr,
    parts_ptr,
    num_tokens,
    k,
    rank,
    stride_xt,
    stride_al,
    num_parts,
    blocks_per_part,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    segment = tl.program_id(1)
    part = tl.program_id(2) % num_parts
    first_token = tl.load(starts_ptr + segment) + tl.program_id(0) * ROWS
    end = tl.load(starts_ptr + segment + 1)
    adapter = tl.load(adapters_ptr + segment).to(tl.int64)
    if first_token >= end:
        return
    o_t = first_token + tl.arange(0, ROWS)
    o_r = tl.program_id(2) // num_parts * RANKS + tl.arange(0, RANKS)
    o_k = tl.arange(0, DEPTH)
    m_t = o_t < end
    m_r = o_r < rank
    b_acc = tl.zeros([ROWS, RANKS], dtype=tl.float32)
    first = part * blocks_per_part
    last = tl.minimum(first + blocks_per_part, tl.cdiv(k, DEPTH))
    if adapter < 0:
        last = first
    p_x = x_ptr + o_t[:, None].to(tl.int64) * stride_xt
    p_a = a_ptr + adapter * stride_al + o_r[None, :].to(tl.int64) * k
    for block in range(first, last):
        at = block * DEPTH + o_k
        b_x = tl.load(p_x + at[None, :], mask=m_t[:, None] & (at < k)[None, :], other=0.0)  # [ROWS, DEPTH]
        b_a = tl.load(p_a + at[:, None], mask=(at < k)[:, None] & m_r[None, :], other=0.0)  # [DEPTH, RANKS]
        b_acc = tl.dot(b_x, b_a, b_acc, input_precision="ieee")
    p_out = parts_ptr + (part.to(tl.int64) * num_tokens + o_t[:, None]) * rank + o_r[None, :]
    tl.store(p_out, b_acc, mask=m_t[:, None] & m_r[None, :])


@triton.jit(do_not_specialize=STEP_ARGS, do_not_specialize_on_alignment=STEP_ARGS)
def lora_expand_kernel(
    parts_ptr,
    b_ptr,
    scaling_ptr,
    starts_ptr,
    adapters_ptr,
    out_ptr,
    num_tokens,
    stacked,
    first,
    second,
    third,
    rank,
    stride_bl,
    stride_ot,
    NUM_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLS: tl.constexpr,
):
    segment = tl.program_id(1)
    first_token = tl.load(starts_ptr + segment) + tl.program_id(0) * ROWS
    end = tl.load(starts_ptr + segment + 1)
    adapter = tl.load(adapters_ptr + segment).to(tl.int64)
    if first_token >= end:
        return
    if adapter < 0:
        return
    # Column tiles do not reach across slices: | first ... | second ... | third ... |
    tile = tl.program_id(2)
    slice_index, slice_start, slice_end = 0, 0, first
    if tile >= tl.cdiv(first, COLS):
        tile -= tl.cdiv(first, COLS)
        slice_index, slice_start, slice_end = 1, first, first + second
        if tile >= tl.cdiv(second, COLS):
            tile -= tl.cdiv(second, COLS)
            slice_index, slice_start, slice_end = 2, first + second, first + second + third
    o_t = first_token + tl.arange(0, ROWS)
    o_n = slice_start + tile * COLS + tl.arange(0, COLS)
    o_r = tl.arange(0, RANKS)
    m_t = o_t < end
    m_n = o_n < slice_end
    m_r = o_r < rank
    p_b = b_ptr + adapter * stride_bl + o_n[None, :].to(tl.int64) * rank + o_r[:, None]
    b_b = tl.load(p_b, mask=m_r[:, None] & m_n[None, :], other=0.0)  # [RANKS, COLS]
    p_part = parts_ptr + o_t[:, None].to(tl.int64) * stacked + slice_index * rank + o_r[None, :]
    b_sum = tl.zeros([ROWS, RANKS], dtype=tl.float32)
    for part in tl.static_range(NUM_PARTS):
        b_sum += tl.load(p_part + part * num_tokens * stacked, mask=m_t[:, None] & m_r[None, :], other=0.0)
    b_more = tl.dot(b_sum.to(b_b.dtype), b_b, input_precision="ieee") * tl.load(scaling_ptr + adapter)
    p_out = out_ptr + o_t[:, None].to(tl.int64) * stride_ot + o_n[None, :]
    mask = m_t[:, None] & m_n[None, :]
    b_out = tl.load(p_out, mask=mask, other=0.0).to(tl.float32) + b_more
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=mask)
