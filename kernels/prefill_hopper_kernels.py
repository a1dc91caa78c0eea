"""Kernels of `kernels.prefill_hopper`, which documents and launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention import STEP_ARGS, capped, widened
from kernels.even_split import LOG2E, sequences_of
from kernels.int4_kv import loaded_int4

LOWEST = tl.constexpr(-1e30)
"""Maximum of a row that has seen no key: masked scores are -inf, so that their weights are 0, not NaN."""
SCHEDULE_ARGS = ["table_ptr", "query_start_loc_ptr", "num_seqs", "num_units", "num_steps"]
GATHER_ARGS = [*STEP_ARGS, "query_start_loc_ptr", "rows_per_seq"]
CHUNK_ARGS = [*GATHER_ARGS, "schedule_ptr", "num_tokens"]


@triton.jit(do_not_specialize=SCHEDULE_ARGS, do_not_specialize_on_alignment=SCHEDULE_ARGS)
def schedule_kernel(
    schedule_ptr,
    table_ptr,
    query_start_loc_ptr,
    num_seqs,
    num_units,
    num_steps,
    BLOCK_Q: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes sequence and first query of each unit, the units with most key tiles first; grid: units / BLOCK.

    table: first key tile of each unit, and the end. num_steps: steps of a binary search over sequences.
    """
    unit = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = unit < num_units
    tiles = tl.load(table_ptr + unit + 1, mask=there, other=0) - tl.load(
        table_ptr + unit, mask=there, other=0
    )
    rank = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num_units, BLOCK):
        other = first + tl.arange(0, BLOCK)
        inside = other < num_units
        of_other = tl.load(table_ptr + other + 1, mask=inside, other=0)
        of_other -= tl.load(table_ptr + other, mask=inside, other=0)
        before = (of_other[None, :] > tiles[:, None]) & inside[None, :]
        equal = (of_other[None, :] == tiles[:, None]) & inside[None, :]
        before = before | (equal & (other[None, :] > unit[:, None]))
        rank += tl.sum(before.to(tl.int32), 1)
    seq = sequences_of(query_start_loc_ptr, unit, num_seqs, num_steps, BLOCK_Q, BLOCK)
    start = tl.load(query_start_loc_ptr + seq, mask=there, other=0)
    tl.store(schedule_ptr + 2 * rank, seq, mask=there)
    tl.store(schedule_ptr + 2 * rank + 1, (unit - start // BLOCK_Q - seq) * BLOCK_Q, mask=there)


@triton.jit(do_not_specialize=GATHER_ARGS, do_not_specialize_on_alignment=GATHER_ARGS)
def gather_context_kernel(
    keys_out_ptr,
    values_out_ptr,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    block_tables_ptr,
    query_start_loc_ptr,
    context_lens_ptr,
    window,
    rows_per_seq,
    stride_kn,
    stride_kp,
    stride_kk,
    stride_vn,
    stride_vp,
    stride_vk,
    stride_tb,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Copies the keys and values that a chunk sees to rows of its own; grid: tiles, sequences, KV heads.

    Rows of these tiles that no query sees become zeros, because a weight of 0 times NaN is NaN.
    """
    seq = tl.program_id(1)
    kv_head = tl.program_id(2)
    first = tl.program_id(0) * BLOCK_N
    length = tl.load(context_lens_ptr + seq)
    num_queries = tl.load(query_start_loc_ptr + seq + 1) - tl.load(query_start_loc_ptr + seq)
    start = 0
    if window is not None:
        start = tl.maximum(length - num_queries - window + 1, 0)
    if (first >= length) | (first + BLOCK_N <= start):
        return
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, HEAD_DIM)
    there = (n >= start) & (n < length)
    table = block_tables_ptr + seq.to(tl.int64) * stride_tb
    block = tl.load(table + n // BLOCK_SIZE, mask=there, other=0).to(tl.int64)
    key_row = block * stride_kn + (n % BLOCK_SIZE) * stride_kp + kv_head * stride_kk
    value_row = block * stride_vn + (n % BLOCK_SIZE) * stride_vp + kv_head * stride_vk
    scale_row = (block * BLOCK_SIZE + n % BLOCK_SIZE) * NUM_KV_HEADS + kv_head
    dtype: tl.constexpr = keys_out_ptr.dtype.element_ty
    if key_ptr.dtype.element_ty == tl.uint8:
        k = loaded_int4(key_ptr, key_scales_ptr, key_row, scale_row, there, dtype, HEAD_DIM, HEAD_DIM)
        v = loaded_int4(value_ptr, value_scales_ptr, value_row, scale_row, there, dtype, HEAD_DIM, HEAD_DIM)
    else:
        k = tl.load(key_ptr + key_row[:, None] + d[None, :], mask=there[:, None], other=0.0)
        v = tl.load(value_ptr + value_row[:, None] + d[None, :], mask=there[:, None], other=0.0)
        if key_scales_ptr is not None:
            key_scale = tl.load(key_scales_ptr + scale_row, mask=there, other=0.0)
            value_scale = tl.load(value_scales_ptr + scale_row, mask=there, other=0.0)
            k = k.to(tl.float32) * key_scale[:, None]
            v = v.to(tl.float32) * value_scale[:, None]
    row = (seq.to(tl.int64) * rows_per_seq + first) * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    at = row + tl.arange(0, BLOCK_N)[:, None] * (NUM_KV_HEADS * HEAD_DIM) + d[None, :]
    tl.store(keys_out_ptr + at, widened(k, dtype))
    tl.store(values_out_ptr + at, widened(v, dtype))


@triton.jit
def _dealt(item, num_items, num_programs):
    """Returns the item in whose place another is: of every other round the items are in reverse.

    So no program has the longest item of each round.
    """
    rounds = item // num_programs
    turned = (2 * rounds + 1) * num_programs - 1 - item
    turns = (rounds % 2 == 1) & ((rounds + 1) * num_programs <= num_items)
    return tl.where(turns, turned, item)


@triton.jit(do_not_specialize=CHUNK_ARGS, do_not_specialize_on_alignment=CHUNK_ARGS)
def prefill_hopper_kernel(
    out_ptr,
    q_ptr,
    key_desc,
    value_desc,
    schedule_ptr,
    block_tables_ptr,
    query_start_loc_ptr,
    context_lens_ptr,
    sinks_ptr,
    scale,
    softcap,
    window,
    num_units,
    num_tokens,
    rows_per_seq,
    stride_ot,
    stride_oh,
    stride_qt,
    stride_tb,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPECIALISED: tl.constexpr,
):
    """Computes tiles of BLOCK_M queries of one head; grid: persistent programs. BLOCK_SIZE 0: dense rows.

    The loop over keys has no branches and is the only one, as Triton's warp specialisation requires; the
    queries' descriptor is made here, because one of the host keeps all rows of a tile when a tile is divided
    between two consumers.
    """
    queries = tl.make_tensor_descriptor(
        q_ptr, [num_tokens, NUM_HEADS * HEAD_DIM], [stride_qt, 1], [BLOCK_M, HEAD_DIM]
    )
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    num_items = num_units * NUM_HEADS
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD_DIM)
    for item in range(program, num_items, num_programs):
        dealt = _dealt(item, num_items, num_programs)
        unit = dealt // NUM_HEADS
        head = dealt % NUM_HEADS
        kv_column = head // (NUM_HEADS // NUM_KV_HEADS) * HEAD_DIM
        seq = tl.load(schedule_ptr + 2 * unit)
        first_query = tl.load(schedule_ptr + 2 * unit + 1)
        chunk_start = tl.load(query_start_loc_ptr + seq)
        num_queries = tl.load(query_start_loc_ptr + seq + 1) - chunk_start
        prefix = tl.load(context_lens_ptr + seq) - num_queries
        query_pos = prefix + first_query + m
        end = prefix + tl.minimum(first_query + BLOCK_M, num_queries)
        lo = 0
        if window is not None:
            lo = tl.maximum(prefix + first_query - window + 1, 0) // BLOCK_N * BLOCK_N
        hi = tl.where(first_query < num_queries, end, 0)
        table_ptr = block_tables_ptr + seq.to(tl.int64) * stride_tb
        q = queries.load([chunk_start + first_query, head * HEAD_DIM])
        top = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
        for first in tl.range(lo, hi, BLOCK_N, warp_specialize=SPECIALISED):
            if BLOCK_SIZE == 0:
                row = seq * rows_per_seq + first
            else:
                row = tl.load(table_ptr + first // BLOCK_SIZE) * BLOCK_SIZE + first % BLOCK_SIZE
            k = key_desc.load([row, kv_column])
            scores = tl.dot(q, k.T, input_precision="ieee")
            scores = capped(scores * scale, softcap) if softcap is not None else scores * (scale * LOG2E)
            n = first + tl.arange(0, BLOCK_N)
            seen = n[None, :] <= query_pos[:, None]
            if window is not None:
                seen = seen & (n[None, :] > query_pos[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            p = tl.exp2(scores - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            sums = tl.sum(p, 1)
            v = value_desc.load([row, kv_column])
            acc = acc * shrink[:, None]
            acc = tl.dot(p.to(q.dtype), v, acc, input_precision="ieee")
            total = total * shrink + sums
            top = new_top
        if sinks_ptr is not None:
            # Infinite if the sink outweighs all keys: then the row is 0, as it should be.
            total += tl.exp2(tl.load(sinks_ptr + head) * LOG2E - top)
        acc = acc / tl.where(total > 0, total, 1.0)[:, None]
        out_at = out_ptr + (chunk_start + first_query).to(tl.int64) * stride_ot + head * stride_oh
        row_ok = (first_query + m < num_queries)[:, None]
        tl.store(out_at + m[:, None] * stride_ot + d[None, :], acc.to(out_ptr.dtype.element_ty), mask=row_ok)
