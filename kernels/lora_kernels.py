"""Kernels of `kernels.lora`, which documents and launches them."""

from __future__ import annotations

import triton
import triton.language as tl

# Arguments that change in every step, so that a kernel compiled for one step serves the next.
STEP_ARGS = ["num_tokens", "starts_ptr", "adapters_ptr"]


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
    """Computes a tile of x @ A of one segment, in one of num_parts parts of its depth."""
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
    """Adds a tile of scaling * (x @ A) @ B of one segment to the output."""
    segment = tl.program_id(1)
    first_token = tl.load(starts_ptr + segment) + tl.program_id(0) * ROWS
    end = tl.load(starts_ptr + segment + 1)
    adapter = tl.load(adapters_ptr + segment).to(tl.int64)
    if first_token >= end:
        return
    if adapter < 0:
        return
    # Column tiles do not cross the borders of slices: | first ... | second ... | third ... |
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
