"""Paged MLA decode: multi-head latent attention (DeepSeek-V2, 2024) with the up-projections absorbed.

Each cached token is one row shared by all query heads: latent_dim numbers that are both key and value, then
rope_dim numbers of the rotated key. With W_UK absorbed into the query and W_UV into the output projection it
is multi-query attention with keys of latent_dim + rope_dim and values of latent_dim: each row is read from
memory once and used by all heads, which makes it compute-heavy for a decode kernel (2 * num_heads * 1,088
flops for 1,152 bytes per token at 512 + 64 in bf16: near the ridge with 128 heads, bandwidth-bound with 16).
The contexts are split over programs as in `kernels.decode_attention`, with the same second pass.

Shapes: B sequences, H query heads, C latent_dim + rope_dim, V latent_dim, N blocks, P block_size, M largest
number of blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention import DTYPES, STEP_ARGS, AttentionOptions, Contexts, check_sequences, shared_split
from kernels.attention_models import made
from kernels.attention_reference import attend, gather_tokens
from kernels.case import Case
from kernels.even_split import LOG2E, combine_parts, make_parts, num_ranges_of, sequence_of
from kernels.launch import INTERPRETER, launch, nearest, target

LATENT_DIMS = (64, 128, 256, 512)
ROPE_DIMS = (16, 32, 64, 128)


class Tile(NamedTuple):
    """Heads and keys of a tile, launch parameters of its program, and programs per multiprocessor."""

    block_h: int
    block_n: int
    num_warps: int
    num_stages: int
    resident: int


# By target, then by the number of heads: the first key that is at least as large, or the last. On sm_90,
# tiles of 64 rows use warpgroup instructions, which read the queries from shared memory.
TILES: dict[str, dict[int, Tile]] = {
    "sm_80": {16: Tile(16, 32, 4, 3, 2), 128: Tile(32, 32, 8, 3, 1)},
    "sm_90": {16: Tile(16, 32, 4, 3, 2), 128: Tile(64, 32, 8, 3, 1)},
    "gfx942": {128: Tile(16, 16, 4, 1, 2)},
    INTERPRETER: {128: Tile(16, 32, 4, 1, 1)},
}


def mla_decode(
    q_BHC: torch.Tensor,
    latent_cache_NPC: torch.Tensor,
    contexts: Contexts,
    *,
    scale: float,
    latent_dim: int = 512,
    num_ranges: int | None = None,
    out_BHV: torch.Tensor | None = None,
) -> torch.Tensor:
    """Returns attention of each sequence's newest token over its context's latent rows, its own included.

    q_BHC: fp32, fp16 or bf16, last dimension contiguous: the absorbed query (latent_dim: 64, 128, 256 or
    512), then the rotated one (rope_dim: 16, 32, 64 or 128). latent_cache_NPC: q's dtype, last dimension
    contiguous. scale: that of the model's query-key head_dim, 192 ** -0.5 in DeepSeek-V3, times the factor of
    its RoPE scaling. The result, still in the latent space, is out_BHV, or a new tensor if that is None, of
    q's dtype. Raises ValueError for unsupported arguments.
    """
    _check(q_BHC, latent_cache_NPC, latent_dim)
    tables, lens = contexts.block_tables_BM, contexts.lens_B
    check_sequences(tables, lens)
    num_seqs, num_heads, width = q_BHC.shape
    if tables.shape[0] != num_seqs or lens.shape[0] != num_seqs:
        raise ValueError(f"{num_seqs} queries: must be one block table and one context length per query")
    tiles = TILES[nearest(target(), TILES)]
    tile = tiles[min((key for key in tiles if key >= num_heads), default=max(tiles))]
    head_tiles = triton.cdiv(num_heads, tile.block_h)
    num_ranges = num_ranges_of(num_ranges, head_tiles, tile.resident, q_BHC.device)
    split = shared_split(contexts, num_ranges, tile.block_n, None)
    parts = make_parts(split, num_heads, latent_dim)
    out = q_BHC.new_empty(num_seqs, num_heads, latent_dim) if out_BHV is None else out_BHV
    launch(
        mla_decode_kernel,
        (head_tiles, num_ranges + num_seqs),
        out,
        *parts,
        split.table,
        q_BHC,
        latent_cache_NPC,
        tables,
        lens,
        scale,
        num_heads,
        *out.stride()[:2],
        *q_BHC.stride()[:2],
        *latent_cache_NPC.stride()[:2],
        tables.stride(0),
        num_seqs,
        BLOCK_SIZE=latent_cache_NPC.shape[1],
        LATENT_DIM=latent_dim,
        ROPE_DIM=width - latent_dim,
        BLOCK_H=tile.block_h,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    combine_parts(out, parts, split)
    return out


def mla_decode_reference(
    q_BHC: torch.Tensor,
    latent_cache_NPC: torch.Tensor,
    contexts: Contexts,
    *,
    scale: float,
    latent_dim: int = 512,
    out_BHV: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the reference of `mla_decode` in torch, one sequence at a time, independent of its batch."""
    out = q_BHC.new_empty(*q_BHC.shape[:2], latent_dim) if out_BHV is None else out_BHV
    out.zero_()
    for seq, length in enumerate(contexts.lens_B.tolist()):
        if length == 0:
            continue
        table_M = contexts.block_tables_BM[seq]
        rows = gather_tokens(latent_cache_NPC[:, :, None], None, table_M, 0, length, q_BHC.dtype)
        options = AttentionOptions(scale=scale)
        out[seq] = attend(q_BHC[seq : seq + 1], rows, rows[..., :latent_dim], options)[0]
    return out


def _check(q_BHC: torch.Tensor, latent_cache_NPC: torch.Tensor, latent_dim: int) -> None:
    if q_BHC.dim() != 3 or q_BHC.stride(-1) != 1 or q_BHC.dtype not in DTYPES:
        raise ValueError(
            f"queries of {q_BHC.dtype} {list(q_BHC.shape)}: must be [num_seqs, num_heads, width] of one of "
            f"{', '.join(map(str, DTYPES))} with a contiguous last dimension"
        )
    rope_dim = q_BHC.shape[2] - latent_dim
    if latent_dim not in LATENT_DIMS or rope_dim not in ROPE_DIMS:
        raise ValueError(
            f"latent_dim {latent_dim} with rope_dim {rope_dim}: must be one of {LATENT_DIMS} with one of "
            f"{ROPE_DIMS}"
        )
    if (
        latent_cache_NPC.dim() != 3
        or latent_cache_NPC.shape[2] != q_BHC.shape[2]
        or latent_cache_NPC.dtype != q_BHC.dtype
        or latent_cache_NPC.stride(2) != 1
    ):
        raise ValueError(
            f"latent cache of {latent_cache_NPC.dtype} {list(latent_cache_NPC.shape)}: must be {q_BHC.dtype} "
            f"[num_blocks, block_size, {q_BHC.shape[2]}] like the queries"
        )


def cases() -> Iterator[Case]:
    """Yields DeepSeek-V3 on a single rank (128 heads) and on one of eight ranks (16 heads)."""
    for num_heads, num_seqs, context_len in ((128, 32, 4096), (16, 64, 4096), (16, 1, 32768), (16, 256, 256)):
        yield Case(
            f"deepseek_v3-heads{num_heads}-batch{num_seqs}-context{context_len}",
            _make(num_heads, num_seqs, context_len),
            bytes_moved=2.0 * num_seqs * (context_len * 576 + num_heads * (576 + 512)),
            flops=2.0 * num_seqs * context_len * num_heads * (576 + 512),
        )


def _make(num_heads: int, num_seqs: int, context_len: int) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        max_blocks = triton.cdiv(context_len, 64)
        num_blocks = num_seqs * max_blocks + 1
        q = made((num_seqs, num_heads, 576), torch.bfloat16, device)
        latents = made((num_blocks, 64, 576), torch.bfloat16, device)
        tables = torch.randperm(num_blocks - 1, device=device).view(num_seqs, max_blocks).int() + 1
        lens = torch.full((num_seqs,), context_len, dtype=torch.int32, device=device)
        contexts = Contexts(tables, lens, context_len)
        return lambda: mla_decode(q, latents, contexts, scale=192**-0.5)

    return make


@triton.jit(do_not_specialize=STEP_ARGS, do_not_specialize_on_alignment=STEP_ARGS)
def mla_decode_kernel(
    out_ptr,
    part_ptr,
    part_lse_ptr,
    table_ptr,
    q_ptr,
    cache_ptr,
    block_tables_ptr,
    context_lens_ptr,
    scale,
    num_heads,
    stride_ob,
    stride_oh,
    stride_qb,
    stride_qh,
    stride_cn,
    stride_cp,
    stride_tb,
    num_units,
    BLOCK_SIZE: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Computes one part, or nothing.

    Grid: tiles of query heads (neighbouring programs share rows in L2), ranges plus sequences.
    """
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    head_ok = head < num_heads
    c = tl.arange(0, LATENT_DIM)
    r = tl.arange(0, ROPE_DIM)

    # A loop over the parts of a range would need more registers than there are. Part p + b is that of range p
    # and sequence b, so a sequence's parts begin at its first range, plus b.
    size = tl.load(table_ptr + tl.num_programs(1) + 1)
    seq = sequence_of(table_ptr, tl.program_id(1), num_units, size)
    index = tl.program_id(1) - seq
    seq_start = tl.load(table_ptr + seq)
    seq_end = tl.load(table_ptr + seq + 1)
    at = tl.maximum(seq_start, index * size)
    stop = tl.minimum(seq_end, index * size + size)
    if at >= stop:
        return
    length = tl.load(context_lens_ptr + seq)
    lo = (at - seq_start) * BLOCK_N
    hi = tl.minimum((stop - seq_start) * BLOCK_N, length)
    # Offsets are int64 in scalars and int32 in tiles, which saves registers.
    q_row = q_ptr + seq.to(tl.int64) * stride_qb + head[:, None] * stride_qh
    q = tl.load(q_row + c[None, :], mask=head_ok[:, None], other=0.0)
    q_rope = tl.load(q_row + LATENT_DIM + r[None, :], mask=head_ok[:, None], other=0.0)
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, LATENT_DIM], tl.float32)
    blocks_ptr = block_tables_ptr + seq.to(tl.int64) * stride_tb
    for first in tl.range(lo, hi, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        seen = n < hi
        block = tl.load(blocks_ptr + n // BLOCK_SIZE, mask=seen, other=0).to(tl.int64)
        row = cache_ptr + (block * stride_cn + (n % BLOCK_SIZE) * stride_cp)[:, None]
        latent = tl.load(row + c[None, :], mask=seen[:, None], other=0.0)
        rope = tl.load(row + LATENT_DIM + r[None, :], mask=seen[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(q_rope, tl.trans(rope), scores, input_precision="ieee")
        scores = tl.where(seen[None, :], scores * (scale * LOG2E), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        top = new_top
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(latent.dtype), latent, acc, input_precision="ieee")

    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    if (at == seq_start) & (stop == seq_end):
        out_at = out_ptr + seq.to(tl.int64) * stride_ob + (head[:, None] * stride_oh + c[None, :])
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=head_ok[:, None])
    else:
        part_row = (2 * index + (at > index * size).to(tl.int32)) * num_heads + head
        tl.store(part_lse_ptr + part_row, top + tl.log2(total), mask=head_ok)
        tl.store(part_ptr + (part_row[:, None] * LATENT_DIM + c[None, :]), acc, mask=head_ok[:, None])
