"""Paged prefill attention: chunks of queries, packed, over their cached prefix and themselves.

FlashAttention-2's tiling (Dao, 2023) over a paged cache. The rows of a tile are BLOCK_M // group tokens times
the query heads of one KV head, so that few tokens fill a tile, too: a decode row, or the drafts of a
speculative step. Tiles of sequences follow each other in one grid dimension, and a program finds its sequence
by a binary search over query_start_loc: no length is read by the host. Tiles that all rows see whole take a
loop without masks; only the diagonal and the window's edge pay for them. Bound by the tensor cores: 4 *
head_dim flops a head and visible (query, key) pair; where few queries meet a long context, by bandwidth, and
the context is split among programs as in decode (num_splits).

A tree mask [q, q] per sequence takes the place of the causal mask within the chunk (the prefix is seen):
the drafts of tree speculation (SpecInfer, 2024). With a window or ALiBi it needs the tokens' positions, which
branches share. Options and shapes as in `kernels.decode_attention`; T tokens of all chunks. Above 400
lines: one kernel and its many arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.case import Case
from kernels.decode_attention import (
    LOG2E,
    MIN_SPLIT_TOKENS,
    MODELS,
    STEP_ARGS,
    Dimensions,
    attend,
    capped,
    check_caches,
    check_num_splits,
    check_options,
    check_sequences,
    choose_num_splits,
    combine_splits,
    decode_attention_reference,
    gather_tokens,
    made,
    made_cache,
    make_partials,
    nearest,
    padded,
    sm_count,
    widened,
)
from kernels.launch import INTERPRETER, launch, target

MAX_PARTIAL_BYTES = 64 << 20
CHUNK_STEP_ARGS = [*STEP_ARGS, "query_start_loc_ptr", "num_seqs"]


class Tile(NamedTuple):
    """Rows (tokens times heads of a group) and keys of a tile, and how its program runs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# By target, then by the head_dim padded to a power of two and the rows that the longest chunk has:
# the first entry at least as large in head_dim, and in rows, or the last.
TILES: dict[str, dict[int, tuple[Tile, ...]]] = {
    "sm_80": {
        64: (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
        128: (Tile(16, 64, 4, 3), Tile(64, 32, 4, 3), Tile(128, 64, 8, 2)),
        256: (Tile(16, 32, 4, 3), Tile(64, 32, 8, 3)),
    },
    "sm_90": {
        64: (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
        128: (Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)),
        256: (Tile(16, 32, 4, 3), Tile(64, 32, 4, 3), Tile(128, 32, 8, 3)),
    },
    "gfx942": {
        64: (Tile(16, 64, 4, 1), Tile(64, 64, 4, 1), Tile(128, 64, 4, 1)),
        128: (Tile(16, 64, 4, 1), Tile(64, 64, 4, 1), Tile(128, 32, 4, 1)),
        256: (Tile(16, 32, 4, 1), Tile(64, 32, 4, 1)),
    },
    INTERPRETER: {256: (Tile(16, 32, 4, 1), Tile(32, 32, 4, 1))},
}


def prefill_attention(
    q_THD: torch.Tensor,
    key_cache_NPKD: torch.Tensor,
    value_cache_NPKD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens_B: torch.Tensor,
    *,
    max_query_len: int,
    max_context_len: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    alibi_slopes_H: torch.Tensor | None = None,
    key_scales_NPK: torch.Tensor | None = None,
    value_scales_NPK: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    tree_mask_start_B: torch.Tensor | None = None,
    positions_T: torch.Tensor | None = None,
    num_splits: int | None = None,
    out_THD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's newest tokens, whose KV is in the cache, over all of its context.

    query_start_loc: int32 [B + 1]; sequence b's tokens are rows query_start_loc[b] to query_start_loc[b + 1],
    the last ones of its context_lens[b]. max_query_len, max_context_len: known to the host, the longest or
    its bucket; they choose tiles and num_splits, and need only be near. tree_mask: bool; its flat element
    tree_mask_start[b] + i * q + j says whether query i of sequence b's q sees the chunk's key j. positions_T:
    int32, absolute; used with a tree mask only, and needed there with a window or ALiBi. Rows of no sequence
    are not written. The rest: see decode_attention. Raises ValueError on what is not supported.
    """
    check_caches(q_THD, key_cache_NPKD, value_cache_NPKD, key_scales_NPK, value_scales_NPK)
    check_sequences(block_tables_BM, query_start_loc, context_lens_B)
    check_options(q_THD, window, softcap, sinks_H, alibi_slopes_H)
    num_seqs = context_lens_B.shape[0]
    if block_tables_BM.shape[0] != num_seqs or query_start_loc.shape[0] != num_seqs + 1:
        raise ValueError(
            f"{num_seqs} context lengths, but {block_tables_BM.shape[0]} block tables and query_start_loc "
            f"of {query_start_loc.shape[0]}: one table a sequence is needed, and one start more"
        )
    biased = window is not None or alibi_slopes_H is not None
    _check_tree(tree_mask, tree_mask_start_B, positions_T, biased)
    num_tokens, num_heads, head_dim = q_THD.shape
    block_size, num_kv_heads = key_cache_NPKD.shape[1:3]
    group = num_heads // num_kv_heads
    # fp32 has no tensor cores on these chips: products of more than 16 rows spill, kilobytes a thread.
    by_threads = q_THD.dtype == torch.float32 and target().startswith("sm_")
    tile = tile_of(head_dim, group, 1 if by_threads else max_query_len)
    # Bits and scales take registers. (Tiles of 16 rows with scales have room; at 32 keys ptxas goes for more
    # programs on a multiprocessor and spills.)
    if tree_mask is not None:
        tile = tile._replace(block_n=32, num_warps=8)
    elif key_scales_NPK is not None and tile.block_m > 16:
        short = window is not None and nearest(target(), TILES) == "sm_80"  # the window takes the last ones
        tile = tile._replace(block_n=16 if short else 32)
    tokens_per_tile = tile.block_m // group
    num_tiles = num_tokens // tokens_per_tile + num_seqs
    if num_splits is None:
        num_splits = _choose_num_splits(q_THD, num_tiles * num_kv_heads, max_context_len, window)
    check_num_splits(num_splits)

    out = torch.empty_like(q_THD, memory_format=torch.contiguous_format) if out_THD is None else out_THD
    partial, partial_lse = make_partials(q_THD, head_dim, num_splits)
    launch(
        prefill_attention_kernel,
        (num_tiles, num_kv_heads, num_splits),
        out,
        partial,
        partial_lse,
        q_THD,
        key_cache_NPKD,
        value_cache_NPKD,
        key_scales_NPK,
        value_scales_NPK,
        block_tables_BM,
        query_start_loc,
        context_lens_B,
        sinks_H,
        alibi_slopes_H,
        None if tree_mask is None else tree_mask.view(torch.uint8),
        tree_mask_start_B,
        positions_T if tree_mask is not None and biased else None,
        head_dim**-0.5 if scale is None else scale,
        softcap,
        window,
        num_seqs,
        *out.stride()[:2],
        *q_THD.stride()[:2],
        *key_cache_NPKD.stride()[:3],
        *value_cache_NPKD.stride()[:3],
        block_tables_BM.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tile.block_m,
        BLOCK_Q=tokens_per_tile,
        BLOCK_N=tile.block_n,
        BLOCK_D=padded(head_dim),
        MIN_TILES=max(1, MIN_SPLIT_TOKENS // tile.block_n) if target() != INTERPRETER else 1,
        SPLIT=num_splits > 1,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    if partial is not None and partial_lse is not None:
        combine_splits(out, partial, partial_lse, sinks_H)
    return out


def prefill_attention_reference(
    q_THD: torch.Tensor,
    key_cache_NPKD: torch.Tensor,
    value_cache_NPKD: torch.Tensor,
    block_tables_BM: torch.Tensor,
    query_start_loc: torch.Tensor,
    context_lens_B: torch.Tensor,
    *,
    max_query_len: int,
    max_context_len: int,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    alibi_slopes_H: torch.Tensor | None = None,
    key_scales_NPK: torch.Tensor | None = None,
    value_scales_NPK: torch.Tensor | None = None,
    tree_mask: torch.Tensor | None = None,
    tree_mask_start_B: torch.Tensor | None = None,
    positions_T: torch.Tensor | None = None,
    num_splits: int | None = None,
    out_THD: torch.Tensor | None = None,
) -> torch.Tensor:
    """`prefill_attention` in torch: sequences one by one, but those of one token together, as in decode."""
    out = torch.zeros_like(q_THD) if out_THD is None else out_THD
    starts, lengths = query_start_loc.tolist(), context_lens_B.tolist()
    counts = [end - start for start, end in itertools.pairwise(starts)]
    options: dict[str, Any] = {
        "scale": q_THD.shape[-1] ** -0.5 if scale is None else scale,
        "softcap": softcap,
        "sinks_H": sinks_H,
        "alibi_slopes_H": alibi_slopes_H,
    }
    single = [seq for seq, count in enumerate(counts) if count == 1] if tree_mask is None else []
    if single:
        seqs = torch.tensor(single, device=q_THD.device)
        rows = query_start_loc[seqs].long()
        out[rows] = decode_attention_reference(
            q_THD[rows],
            key_cache_NPKD,
            value_cache_NPKD,
            block_tables_BM[seqs],
            context_lens_B[seqs],
            max_context_len=max_context_len,
            window=window,
            key_scales_NPK=key_scales_NPK,
            value_scales_NPK=value_scales_NPK,
            **options,
        )
    tree_starts = None if tree_mask_start_B is None else tree_mask_start_B.tolist()
    for seq, (length, num_queries) in enumerate(zip(lengths, counts, strict=True)):
        if num_queries == 0 or (num_queries == 1 and tree_mask is None):
            continue
        tokens = slice(starts[seq], starts[seq + 1])
        prefix = length - num_queries
        first = 0 if window is None else max(0, prefix - window + 1)
        key_pos = torch.arange(first, length, device=q_THD.device)
        query_pos = key_pos[prefix - first :]
        if tree_mask is not None and positions_T is not None:
            query_pos = positions_T[tokens].long()
            key_pos = torch.cat([key_pos[: prefix - first], query_pos])
        distance = key_pos - query_pos[:, None]
        if tree_mask is not None and tree_starts is not None:
            chunk = tree_mask[tree_starts[seq] :][: num_queries**2].view(num_queries, num_queries)
            mask = torch.ones_like(distance, dtype=torch.bool)
            mask[:, prefix - first :] = chunk
        else:
            mask = distance <= 0
        if window is not None:
            mask &= distance > -window
        table = block_tables_BM[seq]
        keys = gather_tokens(key_cache_NPKD, key_scales_NPK, table, first, length, q_THD.dtype)
        values = gather_tokens(value_cache_NPKD, value_scales_NPK, table, first, length, q_THD.dtype)
        out[tokens] = attend(
            q_THD[None, tokens],
            keys[None],
            values[None],
            mask_TL=mask[None],
            distance_TL=distance[None],
            **options,
        )[0]
    return out


def tile_of(head_dim: int, group: int, max_query_len: int) -> Tile:
    """The launch table's entry for the target, a head_dim and chunks of up to max_query_len tokens."""
    by_head_dim = TILES[nearest(target(), TILES)]
    tiles = by_head_dim[min(key for key in by_head_dim if key >= padded(head_dim))]
    if group > tiles[-1].block_m:
        raise ValueError(
            f"{group} query heads a KV head are not supported at head_dim {head_dim} on {target()}; "
            f"up to {tiles[-1].block_m} are"
        )
    rows = group * max_query_len
    return next((t for t in tiles if t.block_m >= rows), tiles[-1])


def _choose_num_splits(
    q_THD: torch.Tensor, num_programs: int, max_context_len: int, window: int | None
) -> int:
    """Splits only where there are too few tiles to fill the chip, and where the parts are small."""
    num_sms = sm_count(q_THD.device)
    if num_programs >= num_sms:
        return 1
    seen = max_context_len if window is None else min(max_context_len, window + q_THD.shape[0])
    most = MAX_PARTIAL_BYTES // max(1, 4 * q_THD.numel())
    return max(1, min(most, choose_num_splits(num_programs, seen, 2 * num_sms)))


def _check_tree(
    tree_mask: torch.Tensor | None,
    tree_mask_start_B: torch.Tensor | None,
    positions_T: torch.Tensor | None,
    biased: bool,
) -> None:
    if tree_mask is None:
        return
    if tree_mask.dtype != torch.bool or not tree_mask.is_contiguous() or tree_mask_start_B is None:
        raise ValueError(
            "tree_mask: a contiguous torch.bool is supported, with tree_mask_start of each sequence"
        )
    if tree_mask_start_B.dtype != torch.int32:
        raise ValueError("tree_mask_start: torch.int32 is supported")
    if biased and (positions_T is None or positions_T.dtype != torch.int32):
        raise ValueError("a tree mask with a window or ALiBi needs the tokens' positions, torch.int32")


def cases() -> Iterator[Case]:
    """Prefill at the engine's dimensions, of whole prompts and of chunks; and verifying drafts."""
    bf16 = torch.bfloat16
    for name, num_seqs, query_len, context_len, dtype in (
        ("llama_8b", 1, 8192, 8192, bf16),
        ("llama_8b", 4, 512, 4096, bf16),
        ("llama_8b", 2, 2048, 2048, torch.int8),
        ("llama_8b", 2, 2048, 2048, torch.float8_e4m3fn),
        ("llama_8b", 1, 5, 32768, bf16),
        ("llama_8b", 16, 1, 4096, bf16),
        ("qwen3_0.6b", 4, 1024, 1024, bf16),
        ("smollm2_135m", 2, 256, 256, bf16),
        ("mistral_7b", 1, 8192, 8192, bf16),
        ("gpt_oss_20b", 1, 4096, 4096, bf16),
        ("gemma2_9b", 1, 4096, 4096, bf16),
        ("mpt_7b", 1, 2048, 2048, bf16),
        ("phi3_mini", 1, 2048, 2048, bf16),
        ("falcon_7b", 1, 2048, 2048, bf16),
    ):
        yield _case(name, num_seqs, query_len, context_len, dtype, tree=False)
    yield _case("llama_8b", 8, 16, 2048, bf16, tree=True)
    yield _case("mistral_7b", 8, 16, 8192, bf16, tree=True)


def _case(
    name: str, num_seqs: int, query_len: int, context_len: int, dtype: torch.dtype, *, tree: bool
) -> Case:
    model = MODELS[name]
    window = model.window or context_len
    pairs = sum(min(context_len - i, window) for i in range(query_len))
    kv_bytes = 2 * min(context_len, window + query_len) * model.num_kv_heads * model.head_dim * dtype.itemsize
    q_elements = query_len * model.num_heads * model.head_dim
    return Case(
        f"{name}-{str(dtype).removeprefix('torch.')}-batch{num_seqs}-{query_len}of{context_len}"
        + ("-tree" if tree else ""),
        _make(model, num_seqs, query_len, context_len, dtype, tree),
        bytes_moved=num_seqs * (kv_bytes + 4 * q_elements),
        flops=4 * num_seqs * pairs * model.num_heads * model.head_dim,
    )


def _make(
    model: Dimensions, num_seqs: int, query_len: int, context_len: int, dtype: torch.dtype, tree: bool
) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        keys, values, tables, lens, scales = made_cache(num_seqs, context_len, model, dtype, device)
        q = made((num_seqs * query_len, model.num_heads, model.head_dim), torch.bfloat16, device)
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device) * query_len
        options: dict[str, Any] = {**model.options(device), **scales}
        if tree:
            own = torch.eye(query_len, dtype=torch.bool, device=device)
            own[:, 0] = True
            depth = torch.arange(query_len, dtype=torch.int32, device=device).clamp(max=1)
            options |= {
                "tree_mask": own.repeat(num_seqs, 1),
                "tree_mask_start_B": starts[:-1] * query_len,
                "positions_T": (depth + context_len - query_len).repeat(num_seqs),
            }
        return lambda: prefill_attention(
            q,
            keys,
            values,
            tables,
            starts,
            lens,
            max_query_len=query_len,
            max_context_len=context_len,
            **options,
        )

    return make


@triton.jit
def _sequence_of(query_start_loc_ptr, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """The sequence of a tile, where sequence b's tiles begin at query_start_loc[b] // BLOCK_Q + b."""
    left = 0
    right = num_seqs
    while right - left > 1:
        middle = (left + right) // 2
        if tl.load(query_start_loc_ptr + middle) // BLOCK_Q + middle <= tile:
            left = middle
        else:
            right = middle
    return left


@triton.jit
def _attend_tiles(
    acc,
    total,
    top,
    q,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    table_ptr,
    positions_ptr,
    tree_ptr,
    slope,
    scale,
    softcap,
    window,
    query_pos,
    query,
    prefix,
    start,
    length,
    lo,
    hi,
    kv_head,
    stride_kn,
    stride_kp,
    stride_kk,
    stride_vn,
    stride_vp,
    stride_vk,
    MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The running softmax over keys lo to hi; without MASKED, lo and hi are full tiles that all rows see."""
    d = tl.arange(0, BLOCK_D)
    for first in tl.range(lo, hi, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        if MASKED:
            there = (n >= start) & (n < length)
            block = tl.load(table_ptr + n // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            kv_ok = there[:, None] & (d < HEAD_DIM)[None, :]
        else:
            block = tl.load(table_ptr + n // BLOCK_SIZE).to(tl.int64)
            kv_ok = (d < HEAD_DIM)[None, :] if HEAD_DIM != BLOCK_D else None
        other = None if kv_ok is None else 0.0
        key_row = block * stride_kn + (n % BLOCK_SIZE) * stride_kp + kv_head * stride_kk
        k = tl.load(key_ptr + key_row[:, None] + d[None, :], mask=kv_ok, other=other)
        scores = tl.dot(q, tl.trans(widened(k, q.dtype)), input_precision="ieee")
        if key_scales_ptr is not None:
            scale_row = (block * BLOCK_SIZE + n % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
            if MASKED:
                key_scale = tl.load(key_scales_ptr + scale_row, mask=there, other=0.0)
            else:
                key_scale = tl.load(key_scales_ptr + scale_row)
            scores *= key_scale[None, :]
        scores = capped(scores * scale, softcap) if softcap is not None else scores * (scale * LOG2E)
        if slope is not None or MASKED:
            key_pos = n
            if positions_ptr is not None:
                own = tl.load(positions_ptr + (n - prefix), mask=(n >= prefix) & (n < length), other=0)
                key_pos = tl.where(n >= prefix, own, n)
        if slope is not None:
            scores += slope[:, None] * (key_pos[None, :] - query_pos[:, None]).to(tl.float32)
        if MASKED:
            if tree_ptr is None:
                seen = n[None, :] <= query_pos[:, None]
            else:
                bit = tree_ptr + query[:, None] * (length - prefix) + (n - prefix)[None, :]
                in_chunk = ((n >= prefix) & (n < length))[None, :] & (query < length - prefix)[:, None]
                seen = tl.load(bit, mask=in_chunk, other=0) != 0
                seen = seen | (n < prefix)[None, :]
            if window is not None:
                seen = seen & (key_pos[None, :] > query_pos[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # Rows that have seen nothing yet.
        base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        top = new_top
        if value_scales_ptr is not None:
            if MASKED:
                value_scale = tl.load(value_scales_ptr + scale_row, mask=there, other=0.0)
            else:
                value_scale = tl.load(value_scales_ptr + scale_row)
            p *= value_scale[None, :]
        value_row = block * stride_vn + (n % BLOCK_SIZE) * stride_vp + kv_head * stride_vk
        v = tl.load(value_ptr + value_row[:, None] + d[None, :], mask=kv_ok, other=other)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(q.dtype), widened(v, q.dtype), acc, input_precision="ieee")
    return acc, total, top


@triton.jit(do_not_specialize=CHUNK_STEP_ARGS, do_not_specialize_on_alignment=CHUNK_STEP_ARGS)
def prefill_attention_kernel(
    out_ptr,
    partial_ptr,
    partial_lse_ptr,
    q_ptr,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_tables_ptr,
    query_start_loc_ptr,
    context_lens_ptr,
    sinks_ptr,
    alibi_slopes_ptr,
    tree_mask_ptr,
    tree_mask_start_ptr,
    positions_ptr,
    scale,
    softcap,
    window,
    num_seqs,
    stride_ot,
    stride_oh,
    stride_qt,
    stride_qh,
    stride_kn,
    stride_kp,
    stride_kk,
    stride_vn,
    stride_vp,
    stride_vk,
    stride_tb,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_TILES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Grid: tiles of all sequences (the last, which see most, first), KV heads, splits."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    seq = _sequence_of(query_start_loc_ptr, tile, num_seqs, BLOCK_Q)
    chunk_start = tl.load(query_start_loc_ptr + seq)
    num_queries = tl.load(query_start_loc_ptr + seq + 1) - chunk_start
    first_query = (tile - chunk_start // BLOCK_Q - seq) * BLOCK_Q
    if first_query >= num_queries:
        return
    length = tl.load(context_lens_ptr + seq)
    prefix = length - num_queries

    m = tl.arange(0, BLOCK_M)
    query = first_query + m // GROUP
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    row_there = (m < BLOCK_Q * GROUP) & (query < num_queries)
    row_ok = row_there[:, None] & (d < HEAD_DIM)[None, :]
    # Wide numbers in the scalars, narrow ones in the tiles: fewer registers.
    first_token = (chunk_start + first_query).to(tl.int64)
    token = m // GROUP
    part_tile = first_token * (NUM_KV_HEADS * GROUP) * num_splits + split
    part_row = (token * (NUM_KV_HEADS * GROUP) + head) * num_splits

    # Positions of the rows, keys that any row sees (start to end), and that all do (full_start to full_end).
    last_query = tl.minimum(first_query + BLOCK_Q, num_queries) - 1
    if tree_mask_ptr is None:
        tree_ptr = None
        first_pos = prefix + first_query
        last_pos = prefix + last_query
        end = last_pos + 1
        full_end = first_pos + 1
    else:
        tree_ptr = tree_mask_ptr + tl.load(tree_mask_start_ptr + seq)
        first_pos = prefix
        last_pos = length - 1
        end = length
        full_end = prefix
    query_pos = prefix + query
    own_positions_ptr = None
    if positions_ptr is not None:
        own_positions_ptr = positions_ptr + chunk_start
        query_pos = tl.load(own_positions_ptr + query, mask=row_there, other=0)
    start = 0
    full_start = 0
    if window is not None:
        start = tl.maximum(first_pos - window + 1, 0)
        full_start = tl.maximum(last_pos - window + 1, 0)

    first_tile = start // BLOCK_N
    num_tiles = tl.cdiv(end, BLOCK_N) - first_tile
    tiles_per_split = tl.maximum(tl.cdiv(num_tiles, num_splits), MIN_TILES) if SPLIT else num_tiles
    lo = first_tile + split * tiles_per_split
    hi = tl.minimum(lo + tiles_per_split, first_tile + num_tiles)
    if SPLIT:  # noqa: SIM102  a constant: nested, so that nothing is compiled where it is false
        if lo >= hi:
            tl.store(
                partial_lse_ptr + part_tile + part_row,
                tl.full([BLOCK_M], float("-inf"), tl.float32),
                mask=row_there,
            )
            return
    full_lo = tl.minimum(tl.maximum(tl.cdiv(full_start, BLOCK_N), lo), hi)
    full_hi = tl.minimum(tl.maximum(full_end // BLOCK_N, full_lo), hi)

    q = tl.load(
        q_ptr + first_token * stride_qt + (token * stride_qt + head * stride_qh)[:, None] + d[None, :],
        mask=row_ok,
        other=0.0,
    )
    slope = None
    if alibi_slopes_ptr is not None:
        slope = tl.load(alibi_slopes_ptr + head, mask=row_there, other=0.0) * LOG2E
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_tb
    # The window's edge, what all rows see, the diagonal.
    for part in tl.static_range(3):
        if part != 0 or window is not None:
            acc, total, top = _attend_tiles(
                acc,
                total,
                top,
                q,
                key_ptr,
                value_ptr,
                key_scales_ptr,
                value_scales_ptr,
                table_ptr,
                own_positions_ptr,
                tree_ptr,
                slope,
                scale,
                softcap,
                window,
                query_pos,
                query,
                prefix,
                start,
                length,
                (lo if part == 0 else full_lo if part == 1 else full_hi) * BLOCK_N,
                (full_lo if part == 0 else full_hi if part == 1 else hi) * BLOCK_N,
                kv_head,
                stride_kn,
                stride_kp,
                stride_kk,
                stride_vn,
                stride_vp,
                stride_vk,
                MASKED=part != 1,
                NUM_KV_HEADS=NUM_KV_HEADS,
                HEAD_DIM=HEAD_DIM,
                BLOCK_SIZE=BLOCK_SIZE,
                BLOCK_N=BLOCK_N,
                BLOCK_D=BLOCK_D,
            )

    if SPLIT:
        tl.store(
            partial_lse_ptr + part_tile + part_row,
            top + tl.log2(tl.where(total > 0, total, 1.0)),
            mask=row_there,
        )
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(
            partial_ptr + part_tile * HEAD_DIM + (part_row[:, None] * HEAD_DIM + d[None, :]), acc, mask=row_ok
        )
    else:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=row_there, other=0.0) * LOG2E
            new_top = tl.maximum(top, sink)
            acc = acc * tl.exp2(top - new_top)[:, None]
            total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_at = (
            out_ptr + first_token * stride_ot + (token * stride_ot + head * stride_oh)[:, None] + d[None, :]
        )
        tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=row_ok)
