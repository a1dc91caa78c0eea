"""Kernel of `kernels.prefill_attention`, which documents and launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.attention import STEP_ARGS
from kernels.prefill_attention_tiles import attended, place_of, store_part, store_rows

CHUNK_STEP_ARGS = [*STEP_ARGS, "query_start_loc_ptr", "num_seqs", "tree_num_before"]


@triton.jit(do_not_specialize=CHUNK_STEP_ARGS, do_not_specialize_on_alignment=CHUNK_STEP_ARGS)
def prefill_attention_kernel(
    out_ptr,
    part_ptr,
    part_lse_ptr,
    table_ptr,
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
    tree_num_before,
    scale,
    softcap,
    window,
    num_seqs,
    num_units,
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
):
    """Computes one unit of attention; grid: units of all sequences (the last first), KV heads.

    With the table of an even split, computes the parts of one range of key tiles; grid: ranges, KV heads.
    """
    kv_head = tl.program_id(1)
    inputs = (q_ptr, block_tables_ptr, context_lens_ptr, stride_qt, stride_qh, stride_tb)
    caches = (key_ptr, value_ptr, key_scales_ptr, value_scales_ptr)
    strides = (stride_kn, stride_kp, stride_kk, stride_vn, stride_vp, stride_vk)
    tree = (tree_mask_ptr, tree_mask_start_ptr, positions_ptr, tree_num_before)
    options = (alibi_slopes_ptr, scale, softcap, window)
    if table_ptr is None:
        unit = tl.num_programs(0) - 1 - tl.program_id(0)
        seq, chunk_start, num_queries, first_query = place_of(unit, query_start_loc_ptr, num_seqs, BLOCK_Q)
        if first_query >= num_queries:
            return
        acc, total, top = attended(
            seq, chunk_start, num_queries, first_query, kv_head, 0, 1 << 30, inputs, caches, strides, tree,
            options, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, BLOCK_M, BLOCK_Q, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        store_rows(
            out_ptr, acc, total, top, chunk_start, num_queries, first_query, kv_head, sinks_ptr, stride_ot,
            stride_oh, GROUP, HEAD_DIM, BLOCK_M, BLOCK_Q, BLOCK_D,
        )  # fmt: skip
    else:
        index = tl.program_id(0)
        num_ranges = tl.num_programs(0)
        size = tl.load(table_ptr + num_units + 1 + num_ranges)
        begin = index * size
        at = begin
        end = tl.minimum(begin + size, tl.load(table_ptr + num_units))
        unit = tl.load(table_ptr + num_units + 1 + index)
        while at < end:
            unit_start = tl.load(table_ptr + unit)
            unit_end = tl.load(table_ptr + unit + 1)
            stop = tl.minimum(end, unit_end)
            seq, chunk_start, num_queries, first_query = place_of(
                unit, query_start_loc_ptr, num_seqs, BLOCK_Q
            )
            if first_query < num_queries:
                acc, total, top = attended(
                    seq, chunk_start, num_queries, first_query, kv_head, at - unit_start, stop - unit_start,
                    inputs, caches, strides, tree, options, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE,
                    BLOCK_M, BLOCK_Q, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                if (at == unit_start) & (stop == unit_end):
                    store_rows(
                        out_ptr, acc, total, top, chunk_start, num_queries, first_query, kv_head, sinks_ptr,
                        stride_ot, stride_oh, GROUP, HEAD_DIM, BLOCK_M, BLOCK_Q, BLOCK_D,
                    )  # fmt: skip
                else:
                    part = 2 * index + (at > begin).to(tl.int32)
                    store_part(
                        part_ptr, part_lse_ptr, part, acc, total, top, num_queries, first_query, kv_head,
                        NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_M, BLOCK_Q, BLOCK_D,
                    )  # fmt: skip
            at = stop
            unit += 1
