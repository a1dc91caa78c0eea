"""Kernel of `kernels.rope`, which documents and launches it."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.int4_kv import store_int4


@triton.jit
def load_pairs(ptr, heads, num_heads, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
               INTERLEAVED: tl.constexpr):  # fmt: skip
    """Loads the first and second members of every pair of `heads` in fp32, each [heads, BLOCK_HALF]."""
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        both = tl.load(ptr + heads * HEAD_DIM + cols, mask=(heads < num_heads) & (cols < 2 * HALF), other=0.0)
        first, second = tl.split(tl.reshape(both, (heads.shape[0], BLOCK_HALF, 2)))
    else:
        cols = tl.arange(0, BLOCK_HALF)[None, :]
        mask = (heads < num_heads) & (cols < HALF)
        first = tl.load(ptr + heads * HEAD_DIM + cols, mask=mask, other=0.0)
        second = tl.load(ptr + heads * HEAD_DIM + HALF + cols, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_pairs(ptr, first, second, heads, num_heads, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
                BLOCK_HALF: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """Stores rotated pairs of dimensions, side by side if INTERLEAVED, else half a head apart."""
    first = first.to(ptr.dtype.element_ty)
    second = second.to(ptr.dtype.element_ty)
    if INTERLEAVED:
        cols = tl.arange(0, 2 * BLOCK_HALF)[None, :]
        both = tl.reshape(tl.join(first, second), (heads.shape[0], 2 * BLOCK_HALF))
        tl.store(ptr + heads * HEAD_DIM + cols, both, mask=(heads < num_heads) & (cols < 2 * HALF))
    else:
        cols = tl.arange(0, BLOCK_HALF)[None, :]
        mask = (heads < num_heads) & (cols < HALF)
        tl.store(ptr + heads * HEAD_DIM + cols, first, mask=mask)
        tl.store(ptr + heads * HEAD_DIM + HALF + cols, second, mask=mask)


@triton.jit
def quantised(x, scale, LARGEST: tl.constexpr, ROUND: tl.constexpr):
    """Returns x / scale within the range of the code; an integer code rounds half up."""
    x = x / scale
    if ROUND:
        x = tl.floor(x + 0.5)
    return tl.minimum(tl.maximum(x, -LARGEST), LARGEST)


@triton.jit
def rope_and_write_kv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    positions_ptr,
    cos_sin_ptr,
    key_cache_ptr,
    value_cache_ptr,
    slots_ptr,
    key_scales_ptr,
    value_scales_ptr,
    stride_q,
    stride_k,
    stride_v,
    num_q_heads,
    num_kv_heads,
    q_groups,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_D: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    LARGEST: tl.constexpr,
    ROUND: tl.constexpr,
    SMALL: tl.constexpr,
):
    """Rotates queries or keys of one token, and writes its keys and values to their slot."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    cols = tl.arange(0, BLOCK_HALF)[None, :]
    at = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
    cos = tl.load(at + cols, mask=cols < HALF, other=0.0)
    sin = tl.load(at + HALF + cols, mask=cols < HALF, other=0.0)
    if group < q_groups:
        heads = group * Q_HEADS + tl.arange(0, Q_HEADS)[:, None]
        q_at = q_ptr + token * stride_q
        a, b = load_pairs(q_at, heads, num_q_heads, HEAD_DIM, HALF, BLOCK_HALF, INTERLEAVED)
        first = a * cos - b * sin
        second = b * cos + a * sin
        store_pairs(q_at, first, second, heads, num_q_heads, HEAD_DIM, HALF, BLOCK_HALF, INTERLEAVED)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            kv_head = (group - q_groups) * KV_HEADS + tl.arange(0, KV_HEADS)  # [KV_HEADS]
            heads = kv_head[:, None]
            k_at = k_ptr + token * stride_k
            a, b = load_pairs(k_at, heads, num_kv_heads, HEAD_DIM, HALF, BLOCK_HALF, INTERLEAVED)
            first = a * cos - b * sin
            second = b * cos + a * sin
            dims = tl.arange(0, BLOCK_D)[None, :]
            v_mask = (heads < num_kv_heads) & (dims < HEAD_DIM)
            v = tl.load(v_ptr + token * stride_v + heads * HEAD_DIM + dims, mask=v_mask, other=0.0).to(
                tl.float32
            )
            rest = None
            if BLOCK_REST > 0:
                rest_dims = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
                rest_mask = (heads < num_kv_heads) & (rest_dims < HEAD_DIM)
                rest = tl.load(k_at + heads * HEAD_DIM + rest_dims, mask=rest_mask, other=0.0).to(tl.float32)
            if key_cache_ptr.dtype.element_ty == tl.uint8:
                row = slot * num_kv_heads
                store_int4(
                    key_cache_ptr + row * (HEAD_DIM // 2), value_cache_ptr + row * (HEAD_DIM // 2),
                    key_scales_ptr + 2 * row, value_scales_ptr + 2 * row, kv_head, num_kv_heads, first,
                    second, rest, v, HEAD_DIM, HALF, INTERLEAVED,
                )  # fmt: skip
            else:
                k_to = key_cache_ptr + slot * num_kv_heads * HEAD_DIM
                if LARGEST > 0:
                    largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
                    if BLOCK_REST > 0:
                        largest = tl.maximum(largest, tl.max(tl.abs(rest), axis=1))
                    k_scale = tl.maximum(largest, SMALL) / LARGEST
                    v_scale = tl.maximum(tl.max(tl.abs(v), axis=1), SMALL) / LARGEST
                    in_range = kv_head < num_kv_heads
                    tl.store(key_scales_ptr + slot * num_kv_heads + kv_head, k_scale, mask=in_range)
                    tl.store(value_scales_ptr + slot * num_kv_heads + kv_head, v_scale, mask=in_range)
                    first = quantised(first, k_scale[:, None], LARGEST, ROUND)
                    second = quantised(second, k_scale[:, None], LARGEST, ROUND)
                    v = quantised(v, v_scale[:, None], LARGEST, ROUND)
                    if BLOCK_REST > 0:
                        rest = quantised(rest, k_scale[:, None], LARGEST, ROUND)
                store_pairs(k_to, first, second, heads, num_kv_heads, HEAD_DIM, HALF, BLOCK_HALF, INTERLEAVED)
                if BLOCK_REST > 0:
                    tl.store(
                        k_to + heads * HEAD_DIM + rest_dims,
                        rest.to(key_cache_ptr.dtype.element_ty),
                        mask=rest_mask,
                    )
                v_to = value_cache_ptr + slot * num_kv_heads * HEAD_DIM
                tl.store(v_to + heads * HEAD_DIM + dims, v.to(value_cache_ptr.dtype.element_ty), mask=v_mask)
