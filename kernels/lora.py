"""Low-rank adapters for a batch that mixes them: out += scaling * (x @ A^T) @ B^T, by each token's adapter.

Chen et al., Punica (MLSys 2024): segmented shrink and expand (SGMV; with one token a segment, BGMV). Tokens
are sorted by adapter; segment s holds the tokens segment_starts[s] .. segment_starts[s + 1] and uses the
adapter segment_adapters[s], -1 for none. Segments may be empty, so a captured graph keeps one number of
segments. Rows before the first start and from the last start on belong to no segment.

Letters: T tokens, S segments, L resident adapters, R ranks (padded with zeros to the largest; several slices'
ranks may be stacked for one shrink), K inputs, N outputs, P parts of K. Each adapter that has tokens is read
once for up to `rows` of them: memory bounds both kernels at decode, with 2*R*(K + N) bytes an adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.case import Case
from kernels.gemm import for_target, random_tensor
from kernels.launch import INTERPRETER, launch

DTYPES = (torch.bfloat16, torch.float16)
MAX_RANK = 64  # of one slice


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
    a_LRK: torch.Tensor,
    segment_starts: torch.Tensor,
    segment_adapters: torch.Tensor,
    *,
    max_segment_tokens: int | None = None,
) -> torch.Tensor:
    """x @ A^T of each token's adapter, as fp32 parts [P, T, R] whose sum over P it is (lora_expand adds
    them).

    x_TK: bf16 or fp16, any row stride. a_LRK: of x's dtype, contiguous, K a multiple of 16. segment_starts:
    int32 [S + 1]. segment_adapters: int32 [S]. max_segment_tokens: no segment has more; default T. Tokens
    without an adapter get zeros; tokens of no segment are not written. Raises ValueError on other dtypes and
    shapes.
    """
    num_tokens, k = x_TK.shape
    _check(x_TK, a_LRK, segment_starts, segment_adapters)
    if a_LRK.shape[2] != k or k % 16:
        raise ValueError(f"A takes {a_LRK.shape[2]} inputs, x has {k}; supported: the same multiple of 16")
    rank = a_LRK.shape[1]
    most = num_tokens if max_segment_tokens is None else max_segment_tokens
    tiles = _tiles(most)
    num_parts = min(tiles.num_parts, triton.cdiv(k, tiles.depth))
    parts_PTR = torch.empty(num_parts, num_tokens, rank, dtype=torch.float32, device=x_TK.device)
    rank_tile = min(tiles.ranks, max(16, triton.next_power_of_2(rank)))
    launch(
        lora_shrink_kernel,
        (triton.cdiv(most, tiles.rows), len(segment_adapters), num_parts * triton.cdiv(rank, rank_tile)),
        x_TK,
        a_LRK,
        segment_starts,
        segment_adapters,
        parts_PTR,
        num_tokens,
        k,
        rank,
        x_TK.stride(0),
        num_parts,
        triton.cdiv(triton.cdiv(k, tiles.depth), num_parts),
        ROWS=tiles.rows,
        RANKS=rank_tile,
        DEPTH=tiles.depth,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return parts_PTR


def lora_shrink_reference(
    x_TK: torch.Tensor,
    a_LRK: torch.Tensor,
    segment_starts: torch.Tensor,
    segment_adapters: torch.Tensor,
    *,
    max_segment_tokens: int | None = None,
) -> torch.Tensor:
    """As lora_shrink, in one part; tokens of no segment get zeros."""
    parts_PTR = torch.zeros(1, x_TK.shape[0], a_LRK.shape[1], dtype=torch.float32, device=x_TK.device)
    for start, end, adapter in _segments(segment_starts, segment_adapters):
        parts_PTR[0, start:end] = x_TK[start:end].float() @ a_LRK[adapter].float().T
    return parts_PTR


def lora_expand(
    parts_PTR: torch.Tensor,
    b_LNR: torch.Tensor,
    scaling_L: torch.Tensor,
    segment_starts: torch.Tensor,
    segment_adapters: torch.Tensor,
    out_TN: torch.Tensor,
    *,
    first_rank: int = 0,
    first_output: int = 0,
    max_segment_tokens: int | None = None,
) -> None:
    """Add to out[:, first_output : first_output + N], in place: scaling * (sum of parts) @ B^T.

    parts_PTR: fp32 of lora_shrink; the ranks from first_rank on are this slice's. b_LNR: bf16 or fp16,
    contiguous, R <= 64; the summed parts are rounded to its dtype. scaling_L: fp32. out_TN: bf16, fp16 or
    fp32, any row stride. Tokens without an adapter are left as they are. Raises ValueError on other dtypes
    and shapes.
    """
    num_parts, num_tokens, stacked = parts_PTR.shape
    _, num_out, rank = b_LNR.shape
    _check_expand(parts_PTR, b_LNR, scaling_L, out_TN, first_rank, first_output)
    _check_segments(segment_starts, segment_adapters)
    most = num_tokens if max_segment_tokens is None else max_segment_tokens
    tiles = _tiles(most)
    launch(
        lora_expand_kernel,
        (triton.cdiv(most, tiles.rows), len(segment_adapters), triton.cdiv(num_out, tiles.cols)),
        parts_PTR,
        b_LNR,
        scaling_L,
        segment_starts,
        segment_adapters,
        out_TN,
        num_tokens,
        stacked,
        num_out,
        rank,
        first_rank,
        first_output,
        out_TN.stride(0),
        NUM_PARTS=num_parts,
        ROWS=tiles.rows,
        RANKS=max(16, triton.next_power_of_2(rank)),
        COLS=tiles.cols,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )


def lora_expand_reference(
    parts_PTR: torch.Tensor,
    b_LNR: torch.Tensor,
    scaling_L: torch.Tensor,
    segment_starts: torch.Tensor,
    segment_adapters: torch.Tensor,
    out_TN: torch.Tensor,
    *,
    first_rank: int = 0,
    first_output: int = 0,
    max_segment_tokens: int | None = None,
) -> None:
    """As lora_expand, in place too; B may also be fp32."""
    _, num_out, rank = b_LNR.shape
    shrunk_TR = parts_PTR.sum(0)[:, first_rank : first_rank + rank].to(b_LNR.dtype).float()
    for start, end, adapter in _segments(segment_starts, segment_adapters):
        rows = out_TN[start:end, first_output : first_output + num_out]
        more = scaling_L[adapter] * (shrunk_TR[start:end] @ b_LNR[adapter].float().T)
        rows.copy_(rows.float() + more)


def _segments(segment_starts: torch.Tensor, segment_adapters: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(first token, token behind the last, adapter) of the segments that have tokens and an adapter."""
    starts = segment_starts.tolist()
    for start, end, adapter in zip(starts[:-1], starts[1:], segment_adapters.tolist(), strict=True):
        if adapter >= 0 and end > start:
            yield start, end, adapter


def _tiles(max_segment_tokens: int) -> LoraTiles:
    table = for_target(TILES)
    return table[16] if max_segment_tokens <= 16 else table[1 << 30]


def _check(
    x_TK: torch.Tensor, a_LRK: torch.Tensor, segment_starts: torch.Tensor, segment_adapters: torch.Tensor
) -> None:
    if x_TK.dtype not in DTYPES or a_LRK.dtype != x_TK.dtype:
        raise ValueError(
            f"x is {x_TK.dtype}, A {a_LRK.dtype}; supported: both torch.bfloat16 or torch.float16"
        )
    if x_TK.stride(1) != 1 or not a_LRK.is_contiguous():
        raise ValueError("the rows of x, and A, must be contiguous")
    _check_segments(segment_starts, segment_adapters)


def _check_segments(segment_starts: torch.Tensor, segment_adapters: torch.Tensor) -> None:
    if segment_starts.dtype != torch.int32 or segment_adapters.dtype != torch.int32:
        raise ValueError("segment_starts and segment_adapters must be torch.int32")
    if len(segment_starts) != len(segment_adapters) + 1:
        raise ValueError(f"{len(segment_adapters)} segments need {len(segment_adapters) + 1} segment_starts")


def _check_expand(
    parts_PTR: torch.Tensor,
    b_LNR: torch.Tensor,
    scaling_L: torch.Tensor,
    out_TN: torch.Tensor,
    first_rank: int,
    first_output: int,
) -> None:
    num_adapters, num_out, rank = b_LNR.shape
    if b_LNR.dtype not in DTYPES or not b_LNR.is_contiguous():
        raise ValueError(f"B is {b_LNR.dtype}; supported: contiguous torch.bfloat16 or torch.float16")
    if rank > MAX_RANK:
        raise ValueError(f"rank {rank} is not supported; supported: up to {MAX_RANK}")
    if parts_PTR.dtype != torch.float32 or not parts_PTR.is_contiguous():
        raise ValueError("parts must be contiguous torch.float32, as lora_shrink returns them")
    if scaling_L.dtype != torch.float32 or scaling_L.shape != (num_adapters,):
        raise ValueError(
            f"scaling is {scaling_L.dtype} {list(scaling_L.shape)}; needed: fp32 [{num_adapters}]"
        )
    if len(out_TN) != parts_PTR.shape[1] or out_TN.stride(1) != 1:
        raise ValueError(f"out is {list(out_TN.shape)}; needed: {parts_PTR.shape[1]} contiguous rows")
    if first_rank + rank > parts_PTR.shape[2] or first_output + num_out > out_TN.shape[1]:
        raise ValueError(
            f"ranks {first_rank} to {first_rank + rank} of {parts_PTR.shape[2]}, outputs {first_output} to "
            f"{first_output + num_out} of {out_TN.shape[1]}: out of range"
        )


def cases() -> Iterator[Case]:
    """Llama-3.1-8B's fused qkv (three slices stacked) and down projection, several adapters and ranks."""
    layers = (
        ("qkv_r16", 4096, 4096, 48, 16),
        ("qkv_r64", 4096, 4096, 192, 64),
        ("down_r8", 14336, 4096, 8, 8),
    )
    for name, k, n, stacked, rank in layers:
        for num_tokens, num_segments in ((8, 8), (64, 16), (2048, 4)):
            adapters = num_segments
            shape = (num_tokens, num_segments, k, n, stacked, rank)
            shrink_bytes = 2 * adapters * stacked * k + 2 * num_tokens * k + 4 * num_tokens * stacked
            expand_bytes = 2 * adapters * rank * n + 4 * num_tokens * n + 4 * num_tokens * rank
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
    num_tokens: int, num_segments: int, k: int, n: int, stacked: int, rank: int, device: torch.device
) -> Callable[[], object]:
    x_TK = random_tensor((num_tokens, k), torch.bfloat16, device)
    a_LRK = random_tensor((num_segments, stacked, k), torch.bfloat16, device)
    starts, adapters, most = _even_segments(num_tokens, num_segments, device)
    return lambda: lora_shrink(x_TK, a_LRK, starts, adapters, max_segment_tokens=most)


def _expand_case(
    num_tokens: int, num_segments: int, k: int, n: int, stacked: int, rank: int, device: torch.device
) -> Callable[[], object]:
    starts, adapters, most = _even_segments(num_tokens, num_segments, device)
    num_parts = min(_tiles(most).num_parts, triton.cdiv(k, _tiles(most).depth))
    parts_PTR = random_tensor((num_parts, num_tokens, stacked), torch.float32, device)
    b_LNR = random_tensor((num_segments, n, rank), torch.bfloat16, device)
    scaling_L = random_tensor((num_segments,), torch.float32, device)
    out_TN = random_tensor((num_tokens, n), torch.bfloat16, device)
    return lambda: lora_expand(parts_PTR, b_LNR, scaling_L, starts, adapters, out_TN, max_segment_tokens=most)


@triton.jit
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
    p_a = a_ptr + (adapter * rank + o_r[None, :]) * k
    for block in range(first, last):
        at = block * DEPTH + o_k
        b_x = tl.load(p_x + at[None, :], mask=m_t[:, None] & (at < k)[None, :], other=0.0)  # [ROWS, DEPTH]
        b_a = tl.load(p_a + at[:, None], mask=(at < k)[:, None] & m_r[None, :], other=0.0)  # [DEPTH, RANKS]
        b_acc = tl.dot(b_x, b_a, b_acc)
    p_out = parts_ptr + (part.to(tl.int64) * num_tokens + o_t[:, None]) * rank + o_r[None, :]
    tl.store(p_out, b_acc, mask=m_t[:, None] & m_r[None, :])


@triton.jit
def lora_expand_kernel(
    parts_ptr,
    b_ptr,
    scaling_ptr,
    starts_ptr,
    adapters_ptr,
    out_ptr,
    num_tokens,
    stacked,
    n,
    rank,
    first_rank,
    first_output,
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
    o_t = first_token + tl.arange(0, ROWS)
    o_n = tl.program_id(2) * COLS + tl.arange(0, COLS)
    o_r = tl.arange(0, RANKS)
    m_t = o_t < end
    m_n = o_n < n
    m_r = o_r < rank
    p_b = b_ptr + (adapter * n + o_n[None, :]) * rank + o_r[:, None]
    b_b = tl.load(p_b, mask=m_r[:, None] & m_n[None, :], other=0.0)  # [RANKS, COLS]
    p_part = parts_ptr + o_t[:, None].to(tl.int64) * stacked + first_rank + o_r[None, :]
    b_sum = tl.zeros([ROWS, RANKS], dtype=tl.float32)
    for part in tl.static_range(NUM_PARTS):
        b_sum += tl.load(p_part + part * num_tokens * stacked, mask=m_t[:, None] & m_r[None, :], other=0.0)
    b_more = tl.dot(b_sum.to(b_b.dtype), b_b) * tl.load(scaling_ptr + adapter)
    p_out = out_ptr + o_t[:, None].to(tl.int64) * stride_ot + first_output + o_n[None, :]
    mask = m_t[:, None] & m_n[None, :]
    b_out = tl.load(p_out, mask=mask, other=0.0).to(tl.float32) + b_more
    tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=mask)
