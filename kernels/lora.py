"""LoRA adapters in a batch with several of them: out += scaling * (x @ A^T) @ B^T with each token's adapter.

Chen et al., Punica (MLSys 2024): segmented shrink and expand (SGMV; with one token per segment, BGMV). Tokens
are sorted by adapter; segment s has the tokens starts[s] .. starts[s + 1] and the adapter adapters[s], -1 for
none. Segments may be empty, so that a captured graph has a fixed number of them. Rows before the first start
and from the last start on belong to no segment.

A fused projection (queries, keys and values) has one slice per part: the slices' A are stacked along the
ranks and their B along the outputs, so that it needs one shrink and one expand as well.

Letters: T tokens, S segments, L resident adapters, R ranks of a slice (padded with zeros to the largest), Z
ranks of all slices, K inputs, N outputs of all slices, P parts of K. Each adapter with tokens is read once
per `rows` tokens, so both kernels are memory-bound in decode, with 2 (Z K + R N) bytes per adapter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
import triton

from kernels.case import Case
from kernels.gemm import for_target, random_tensor
from kernels.launch import INTERPRETER, launch
from kernels.lora_kernels import lora_expand_kernel, lora_shrink_kernel

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_RANK = 64  # per slice
MAX_SLICES = 3


class LoraTiles(NamedTuple):
    """Launch sizes: tokens per program (rows); ranks, depth and parts of K (shrink); columns (expand)."""

    rows: int
    ranks: int
    depth: int
    cols: int
    num_parts: int
    num_warps: int
    num_stages: int


# By target, and by the largest number of tokens in a segment.
TILES = {
    "sm_80": {16: LoraTiles(16, 32, 128, 128, 8, 4, 3), 1 << 30: LoraTiles(64, 32, 64, 128, 2, 4, 3)},
    "sm_90": {16: LoraTiles(16, 32, 256, 128, 8, 4, 3), 1 << 30: LoraTiles(64, 32, 128, 128, 2, 4, 3)},
    "gfx942": {16: LoraTiles(16, 32, 128, 128, 8, 4, 2), 1 << 30: LoraTiles(64, 32, 64, 128, 2, 4, 2)},
    INTERPRETER: {16: LoraTiles(16, 16, 32, 32, 2, 4, 1), 1 << 30: LoraTiles(32, 16, 32, 32, 1, 4, 1)},
}


class Segments(NamedTuple):
    """Segments of a step's tokens that use the same adapter; tensors on the device."""

    starts: torch.Tensor
    """int32 [S + 1]; tokens before the first and from the last on are in no segment and have no adapter."""
    adapters: torch.Tensor
    """int32 [S], adapter of each segment; -1: none."""
    max_tokens: int | None = None
    """Upper bound of the tokens of a segment; None: the number of all tokens."""


def lora_shrink(x_TK: torch.Tensor, a_LZK: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Returns x @ A^T of each token's adapter, as fp32 parts [P, T, Z] that lora_expand sums over P.

    x_TK: bf16, fp16 or fp32, any row stride. a_LZK: of x's dtype, contiguous for each adapter, K a multiple
    of 16. Tokens without an adapter get zeros; tokens of no segment are not written. Raises ValueError for
    other dtypes and shapes.
    """
    num_tokens, k = x_TK.shape
    _check(x_TK, a_LZK, segments)
    if a_LZK.shape[2] != k or k % 16:
        raise ValueError(f"A has {a_LZK.shape[2]} inputs, x {k}; must be the same multiple of 16")
    rank = a_LZK.shape[1]
    most = num_tokens if segments.max_tokens is None else segments.max_tokens
    tiles = _tiles(most, x_TK.dtype)
    num_parts = min(tiles.num_parts, triton.cdiv(k, tiles.depth))
    parts_PTZ = torch.empty(num_parts, num_tokens, rank, dtype=torch.float32, device=x_TK.device)
    rank_tile = min(tiles.ranks, max(16, triton.next_power_of_2(rank)))
    launch(
        lora_shrink_kernel,
        (triton.cdiv(most, tiles.rows), len(segments.adapters), num_parts * triton.cdiv(rank, rank_tile)),
        x_TK,
        a_LZK,
        segments.starts,
        segments.adapters,
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


def lora_shrink_reference(x_TK: torch.Tensor, a_LZK: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Computes the reference of `lora_shrink` in torch, in one part; tokens of no segment get zeros."""
    parts_PTZ = torch.zeros(1, x_TK.shape[0], a_LZK.shape[1], dtype=torch.float32, device=x_TK.device)
    for start, end, adapter in _used(segments):
        parts_PTZ[0, start:end] = x_TK[start:end].float() @ a_LZK[adapter].float().T
    return parts_PTZ


def lora_expand(
    parts_PTZ: torch.Tensor,
    b_LNR: torch.Tensor,
    scaling_L: torch.Tensor,
    segments: Segments,
    out_TN: torch.Tensor,
    *,
    slices: Sequence[int] | None = None,
) -> None:
    """Adds scaling * (sum of parts) @ B^T to out in place, each slice's outputs from its own ranks.

    parts_PTZ: fp32, from lora_shrink. b_LNR: bf16, fp16 or fp32, contiguous for each adapter, R <= 64; the
    summed parts are rounded to its dtype. scaling_L: fp32. out_TN: bf16, fp16 or fp32, any row stride.
    slices: number of outputs of each slice, up to 3; None: one slice of N. Slice s has the ranks s R .. (s +
    1) R of Z. Tokens without an adapter are not changed. Raises ValueError for other dtypes and shapes.
    """
    num_parts, num_tokens, stacked = parts_PTZ.shape
    _, num_out, rank = b_LNR.shape
    slices = [num_out] if slices is None else list(slices)
    _check_expand(parts_PTZ, b_LNR, scaling_L, out_TN, slices)
    _check_segments(segments)
    first, second, third = [*slices, 0, 0][:MAX_SLICES]
    most = num_tokens if segments.max_tokens is None else segments.max_tokens
    tiles = _tiles(most, b_LNR.dtype)
    launch(
        lora_expand_kernel,
        (
            triton.cdiv(most, tiles.rows),
            len(segments.adapters),
            sum(triton.cdiv(width, tiles.cols) for width in slices),
        ),
        parts_PTZ,
        b_LNR,
        scaling_L,
        segments.starts,
        segments.adapters,
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
    segments: Segments,
    out_TN: torch.Tensor,
    *,
    slices: Sequence[int] | None = None,
) -> None:
    """Computes the reference of `lora_expand` in torch, also in place."""
    _, num_out, rank = b_LNR.shape
    slices = [num_out] if slices is None else list(slices)
    shrunk_TZ = parts_PTZ.sum(0).to(b_LNR.dtype).float()
    scalings = scaling_L.tolist()
    for start, end, adapter in _used(segments):
        ranks_of = shrunk_TZ[start:end].split(rank, dim=1)
        outputs_of = out_TN[start:end].split(slices, dim=1)
        for ranks, outputs, b_NR in zip(ranks_of, outputs_of, b_LNR[adapter].split(slices), strict=True):
            outputs.copy_(torch.addmm(outputs.float(), ranks, b_NR.float().T, alpha=scalings[adapter]))


def _used(segments: Segments) -> Iterator[tuple[int, int, int]]:
    """Yields (first token, end token, adapter) of the segments that have tokens and an adapter."""
    starts = segments.starts.tolist()
    for start, end, adapter in zip(starts[:-1], starts[1:], segments.adapters.tolist(), strict=True):
        if adapter >= 0 and end > start:
            yield start, end, adapter


def _tiles(max_segment_tokens: int, dtype: torch.dtype) -> LoraTiles:
    table = for_target(TILES)
    few = max_segment_tokens <= 16 or dtype == torch.float32  # the large tile spills registers in fp32
    return table[16] if few else table[1 << 30]


def _check(x_TK: torch.Tensor, a_LZK: torch.Tensor, segments: Segments) -> None:
    if x_TK.dtype not in DTYPES or a_LZK.dtype != x_TK.dtype:
        raise ValueError(
            f"x is {x_TK.dtype}, A {a_LZK.dtype}; must be the same, one of {', '.join(map(str, DTYPES))}"
        )
    if x_TK.stride(1) != 1 or not a_LZK[0].is_contiguous():
        raise ValueError("the rows of x and the A of each adapter must be contiguous")
    _check_segments(segments)


def _check_segments(segments: Segments) -> None:
    starts, adapters, _ = segments
    if starts.dtype != torch.int32 or adapters.dtype != torch.int32:
        raise ValueError("the segments' starts and adapters must be torch.int32")
    if len(starts) != len(adapters) + 1:
        raise ValueError(f"{len(adapters)} segments need {len(adapters) + 1} starts, found {len(starts)}")


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
            f"B is {b_LNR.dtype}; must be one of {', '.join(map(str, DTYPES))}, contiguous for each adapter"
        )
    if rank > MAX_RANK:
        raise ValueError(f"rank {rank}: must be at most {MAX_RANK}")
    if parts_PTZ.dtype != torch.float32 or not parts_PTZ.is_contiguous():
        raise ValueError("parts must be contiguous torch.float32, as lora_shrink returns them")
    if scaling_L.dtype != torch.float32 or scaling_L.shape != (num_adapters,):
        raise ValueError(
            f"scaling is {scaling_L.dtype} {list(scaling_L.shape)}; must be fp32 [{num_adapters}]"
        )
    if out_TN.shape != (parts_PTZ.shape[1], num_out) or out_TN.stride(1) != 1:
        needed = [parts_PTZ.shape[1], num_out]
        raise ValueError(f"out is {list(out_TN.shape)}; must be {needed} with contiguous rows")
    if not 1 <= len(slices) <= MAX_SLICES or sum(slices) != num_out:
        raise ValueError(
            f"slices={list(slices)}: must be up to {MAX_SLICES} numbers with a sum of {num_out} outputs"
        )
    if len(slices) * rank != parts_PTZ.shape[2]:
        raise ValueError(
            f"parts have {parts_PTZ.shape[2]} ranks; must be {len(slices) * rank} for {len(slices)} slices"
        )


def cases() -> Iterator[Case]:
    """Yields Llama-3.1-8B's fused qkv (three slices) and down projection with several ranks and adapters."""
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


def _even_segments(num_tokens: int, num_segments: int, device: torch.device) -> Segments:
    each = num_tokens // num_segments
    starts = torch.arange(num_segments + 1, dtype=torch.int32, device=device) * each
    return Segments(starts, torch.arange(num_segments, dtype=torch.int32, device=device), each)


def _shrink_case(
    num_tokens: int, num_segments: int, k: int, slices: tuple[int, ...], rank: int, device: torch.device
) -> Callable[[], object]:
    x_TK = random_tensor((num_tokens, k), torch.bfloat16, device)
    a_LZK = random_tensor((num_segments, len(slices) * rank, k), torch.bfloat16, device)
    segments = _even_segments(num_tokens, num_segments, device)
    return lambda: lora_shrink(x_TK, a_LZK, segments)


def _expand_case(
    num_tokens: int, num_segments: int, k: int, slices: tuple[int, ...], rank: int, device: torch.device
) -> Callable[[], object]:
    segments = _even_segments(num_tokens, num_segments, device)
    tiles = _tiles(num_tokens // num_segments, torch.bfloat16)
    num_parts = min(tiles.num_parts, triton.cdiv(k, tiles.depth))
    parts_PTZ = random_tensor((num_parts, num_tokens, len(slices) * rank), torch.float32, device)
    b_LNR = random_tensor((num_segments, sum(slices), rank), torch.bfloat16, device)
    scaling_L = random_tensor((num_segments,), torch.float32, device)
    out_TN = random_tensor((num_tokens, sum(slices)), torch.bfloat16, device)
    return lambda: lora_expand(parts_PTZ, b_LNR, scaling_L, segments, out_TN, slices=slices)
