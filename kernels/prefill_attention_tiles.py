"""Attention of one unit, a tile of queries, for the kernels of `kernels.prefill_attention`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention import capped, widened
from kernels.even_split import LOG2E, sequence_of, tiles_of_queries
from kernels.int4_kv import loaded_int4


@triton.jit
def _attend_tiles(  # noqa: C901, PLR0912, PLR0915  a Triton kernel is one function
    acc, total, top, q, caches, strides, table_ptr, positions_ptr, tree_ptr, slope, scale, softcap, window,
    query_pos, query, prefix, start, length, lo, hi, kv_head, MASKED: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr
):  # fmt: skip
    """Continues the running softmax over keys lo to hi; without MASKED all rows see all of these keys."""
    key_ptr, value_ptr, key_scales_ptr, value_scales_ptr = caches
    stride_kn, stride_kp, stride_kk, stride_vn, stride_vp, stride_vk = strides
    is_int4: tl.constexpr = key_ptr.dtype.element_ty == tl.uint8
    has_factors: tl.constexpr = key_scales_ptr is not None and not is_int4
    d = tl.arange(0, BLOCK_D)
    for first in tl.range(lo, hi, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        if MASKED:
            there = (n >= start) & (n < length)
            block = tl.load(table_ptr + n // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
            kv_ok = there[:, None] & (d < HEAD_DIM)[None, :]
        else:
            there = None
            block = tl.load(table_ptr + n // BLOCK_SIZE).to(tl.int64)
            kv_ok = (d < HEAD_DIM)[None, :] if HEAD_DIM != BLOCK_D else None
        other = None if kv_ok is None else 0.0
        key_row = block * stride_kn + (n % BLOCK_SIZE) * stride_kp + kv_head * stride_kk
        scale_row = (block * BLOCK_SIZE + n % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
        if is_int4:
            k = loaded_int4(key_ptr, key_scales_ptr, key_row, scale_row, there, q.dtype, HEAD_DIM, BLOCK_D)
        else:
            k = tl.load(key_ptr + key_row[:, None] + d[None, :], mask=kv_ok, other=other)
        scores = tl.dot(q, tl.trans(widened(k, q.dtype)), input_precision="ieee")
        if has_factors:
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
        # Rows that have seen no key yet have a maximum of -inf.
        base = tl.where(new_top == float("-inf"), 0.0, new_top) if MASKED else new_top
        p = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(top - base)
        total = total * shrink + tl.sum(p, 1)
        top = new_top
        if has_factors:
            if MASKED:
                value_scale = tl.load(value_scales_ptr + scale_row, mask=there, other=0.0)
            else:
                value_scale = tl.load(value_scales_ptr + scale_row)
            p *= value_scale[None, :]
        value_row = block * stride_vn + (n % BLOCK_SIZE) * stride_vp + kv_head * stride_vk
        if is_int4:
            v = loaded_int4(
                value_ptr, value_scales_ptr, value_row, scale_row, there, q.dtype, HEAD_DIM, BLOCK_D
            )
        else:
            v = tl.load(value_ptr + value_row[:, None] + d[None, :], mask=kv_ok, other=other)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(q.dtype), widened(v, q.dtype), acc, input_precision="ieee")
    return acc, total, top


@triton.jit
def place_of(unit, query_start_loc_ptr, num_seqs, BLOCK_Q: tl.constexpr):
    """Returns a unit's sequence, the first token of its chunk and its queries, and the unit's first query."""
    seq = sequence_of(query_start_loc_ptr, unit, num_seqs, BLOCK_Q)
    chunk_start = tl.load(query_start_loc_ptr + seq)
    num_queries = tl.load(query_start_loc_ptr + seq + 1) - chunk_start
    return seq, chunk_start, num_queries, (unit - chunk_start // BLOCK_Q - seq) * BLOCK_Q


@triton.jit
def attended(
    seq, chunk_start, num_queries, first_query, kv_head, from_tile, to_tile, inputs, caches, strides, tree,
    options, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr
):  # fmt: skip
    """Returns the running softmax of a unit over its key tiles from_tile to to_tile.

    inputs, caches, strides, tree and options are the kernel's arguments in groups.
    """
    q_ptr, block_tables_ptr, context_lens_ptr, stride_qt, stride_qh, stride_tb = inputs
    tree_mask_ptr, tree_mask_start_ptr, positions_ptr, tree_num_before = tree
    alibi_slopes_ptr, scale, softcap, window = options
    length = tl.load(context_lens_ptr + seq)
    prefix = length - num_queries
    m = tl.arange(0, BLOCK_M)
    query = first_query + m // GROUP
    head = kv_head * GROUP + m % GROUP
    d = tl.arange(0, BLOCK_D)
    row_there = (m < BLOCK_Q * GROUP) & (query < num_queries)
    row_ok = row_there[:, None] & (d < HEAD_DIM)[None, :]
    # Offsets are int64 in scalars and int32 in tiles, which saves registers.
    first_token = (chunk_start + first_query).to(tl.int64)
    token = m // GROUP

    # Positions of the rows; keys that some row sees (from start on), and that all rows see (full_start to
    # full_end).
    first_tile, num_tiles = tiles_of_queries(
        first_query,
        num_queries,
        length,
        tree_num_before,
        window,
        BLOCK_Q,
        BLOCK_N,
        tree_mask_ptr is not None,
    )
    query_pos = prefix + query
    own_positions_ptr = None
    if tree_mask_ptr is None:
        tree_ptr = None
        first_pos = prefix + first_query
        last_pos = prefix + tl.minimum(first_query + BLOCK_Q, num_queries) - 1
        full_end = first_pos + 1
    else:
        tree_ptr = tree_mask_ptr + tl.load(tree_mask_start_ptr + seq)
        prefix -= tree_num_before  # from here on the mask decides
        first_pos = prefix
        last_pos = length - 1
        full_end = prefix
        if positions_ptr is not None:
            own_positions_ptr = positions_ptr + chunk_start + seq * tree_num_before
            query_pos = tl.load(own_positions_ptr + tree_num_before + query, mask=row_there, other=0)
        query = tl.where(row_there, query, length)  # rows of no query read no mask
    start = 0
    full_start = 0
    if window is not None:
        start = tl.maximum(first_pos - window + 1, 0)
        full_start = tl.maximum(last_pos - window + 1, 0)
    lo = first_tile + from_tile
    hi = first_tile + tl.minimum(to_tile, num_tiles)
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
    blocks_ptr = block_tables_ptr + seq.to(tl.int64) * stride_tb
    # Three parts: the window's edge, the keys that all rows see, the diagonal.
    for part in tl.static_range(3):
        if part != 0 or window is not None:
            acc, total, top = _attend_tiles(
                acc, total, top, q, caches, strides, blocks_ptr, own_positions_ptr, tree_ptr, slope, scale,
                softcap, window, query_pos, query, prefix, start, length,
                (lo if part == 0 else full_lo if part == 1 else full_hi) * BLOCK_N,
                (full_lo if part == 0 else full_hi if part == 1 else hi) * BLOCK_N,
                kv_head, part != 1, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, BLOCK_D,
            )  # fmt: skip
    return acc, total, top


@triton.jit
def store_rows(
    out_ptr, acc, total, top, chunk_start, num_queries, first_query, kv_head, sinks_ptr, stride_ot, stride_oh,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_D: tl.constexpr
):  # fmt: skip
    """Stores a unit's output, sinks included."""
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + m % GROUP
    row_there = (m < BLOCK_Q * GROUP) & (first_query + m // GROUP < num_queries)
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head, mask=row_there, other=0.0) * LOG2E
        new_top = tl.maximum(top, sink)
        acc = acc * tl.exp2(top - new_top)[:, None]
        total = total * tl.exp2(top - new_top) + tl.exp2(sink - new_top)
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_ptr += (chunk_start + first_query).to(tl.int64) * stride_ot
    out_at = out_ptr + (m // GROUP * stride_ot + head * stride_oh)[:, None] + d[None, :]
    row_ok = row_there[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(out_at, acc.to(out_ptr.dtype.element_ty), mask=row_ok)


@triton.jit
def store_part(
    part_ptr, part_lse_ptr, part, acc, total, top, num_queries, first_query, kv_head,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr
):  # fmt: skip
    """Stores the part of a unit that a range has computed, and its log2-sum-exps."""
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    row_there = (m < BLOCK_Q * GROUP) & (first_query + m // GROUP < num_queries)
    row = (part * BLOCK_Q + m // GROUP) * (NUM_KV_HEADS * GROUP) + kv_head * GROUP + m % GROUP
    weight = tl.where(total > 0, total, 1.0)
    tl.store(part_lse_ptr + row, top + tl.log2(weight), mask=row_there)
    row_ok = row_there[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(part_ptr + row[:, None] * HEAD_DIM + d[None, :], acc / weight[:, None], mask=row_ok)
