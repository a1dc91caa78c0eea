"""Kernels of `kernels.moe`, which documents and launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.gemm import swizzled

# Arguments that change in every step, so that a kernel compiled for one step serves the next.
STEP_ARGS = ["num_tokens", "num_entries", "num_blocks", "num_chunks"]


@triton.jit(do_not_specialize=STEP_ARGS)
def moe_route_kernel(
    logits_ptr,
    weights_ptr,
    experts_ptr,
    num_tokens,
    num_experts,
    CHOICES: tl.constexpr,
    RENORMALISE: tl.constexpr,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES_TILE: tl.constexpr,
):
    """Chooses the experts of ROWS tokens by their logits, and computes their weights."""
    o_t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o_e = tl.arange(0, EXPERTS)
    o_j = tl.arange(0, CHOICES_TILE)
    m_t = o_t < num_tokens
    m_e = (o_e < num_experts)[None, :]
    p_logits = logits_ptr + o_t[:, None].to(tl.int64) * num_experts + o_e[None, :]
    b_logits = tl.load(p_logits, mask=m_t[:, None] & m_e, other=0.0).to(tl.float32)
    b_logits = tl.where(m_e, b_logits, float("-inf"))
    b_exp = tl.exp(b_logits - tl.max(b_logits, 1)[:, None])
    b_left = tl.where(m_e, b_exp / tl.sum(b_exp, 1)[:, None], -1.0)  # weights not chosen yet
    b_weights = tl.zeros([ROWS, CHOICES_TILE], dtype=tl.float32)
    b_experts = tl.zeros([ROWS, CHOICES_TILE], dtype=tl.int32)
    for j in tl.static_range(CHOICES):
        b_best = tl.argmax(b_left, 1, tie_break_left=True)
        b_weights += tl.where((o_j == j)[None, :], tl.max(b_left, 1)[:, None], 0.0)
        b_experts += tl.where((o_j == j)[None, :], b_best[:, None], 0)
        b_left = tl.where(o_e[None, :] == b_best[:, None], -1.0, b_left)
    if RENORMALISE:
        b_weights = b_weights / tl.sum(b_weights, 1)[:, None]
    o_out = o_t[:, None] * CHOICES + o_j[None, :]
    mask = m_t[:, None] & (o_j < CHOICES)[None, :]
    tl.store(weights_ptr + o_out, b_weights, mask=mask)
    tl.store(experts_ptr + o_out, b_experts, mask=mask)


@triton.jit
def entries_by_expert(experts_ptr, chunk, num_entries, CHUNK: tl.constexpr, EXPERTS: tl.constexpr):
    """Returns a chunk's entries, and their experts one-hot [CHUNK, EXPERTS]; a row of zeros for -1."""
    o_i = chunk * CHUNK + tl.arange(0, CHUNK)
    b_expert = tl.load(experts_ptr + o_i, mask=o_i < num_entries, other=-1)
    return o_i, (b_expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@triton.jit(do_not_specialize=STEP_ARGS)
def moe_count_kernel(
    experts_ptr, counts_ptr, num_entries, num_experts, CHUNK: tl.constexpr, EXPERTS: tl.constexpr
):
    """Counts the entries of each expert in one chunk of entries."""
    chunk = tl.program_id(0)
    _o_i, b_hot = entries_by_expert(experts_ptr, chunk, num_entries, CHUNK, EXPERTS)
    o_e = tl.arange(0, EXPERTS)
    tl.store(counts_ptr + chunk * num_experts + o_e, tl.sum(b_hot, 0), mask=o_e < num_experts)


@triton.jit(do_not_specialize=STEP_ARGS)
def moe_place_kernel(
    experts_ptr,
    counts_ptr,
    rows_ptr,
    ends_ptr,
    num_entries,
    num_experts,
    num_chunks,
    ONE_CHUNK: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    EXPERTS: tl.constexpr,
):
    """Places the entries of one chunk into the blocks of rows of their experts."""
    chunk = tl.program_id(0)
    o_e = tl.arange(0, EXPERTS)
    m_e = o_e < num_experts
    o_i, b_hot = entries_by_expert(experts_ptr, chunk, num_entries, CHUNK, EXPERTS)
    b_before = tl.zeros([EXPERTS], dtype=tl.int32)  # entries of each expert in earlier chunks
    if ONE_CHUNK:
        b_total = tl.sum(b_hot, 0)
    else:
        b_total = tl.zeros([EXPERTS], dtype=tl.int32)
        for other in range(0, num_chunks):
            b_count = tl.load(counts_ptr + other * num_experts + o_e, mask=m_e, other=0)
            b_total += b_count
            b_before += tl.where(other < chunk, b_count, 0)
    b_padded = (b_total + BLOCK_ROWS - 1) // BLOCK_ROWS * BLOCK_ROWS
    b_end = tl.cumsum(b_padded, 0)
    b_first = b_end - b_padded
    b_rank = tl.cumsum(b_hot, 0) - b_hot  # entries of the same expert before this one, in the chunk
    b_row = tl.sum(b_hot * (b_rank + (b_first + b_before)[None, :]), 1)
    tl.store(rows_ptr + b_row, o_i, mask=tl.sum(b_hot, 1) > 0)
    if chunk == 0:
        tl.store(ends_ptr + o_e, b_end, mask=m_e)
        for row in range(0, BLOCK_ROWS):  # the padding after each expert's entries
            o_pad = b_first + b_total + row
            tl.store(rows_ptr + o_pad, tl.full([EXPERTS], -1, tl.int32), mask=o_pad < b_end)


@triton.jit
def weight_tile(p_codes, p_scales, at, mask, MXFP4: tl.constexpr):
    """Loads the weights at inputs `at` of rows: as stored, or 4-bit numbers in fp32."""
    if MXFP4:  # noqa: SIM108  only the chosen branch is compiled
        tile = mxfp4_tile(p_codes, p_scales, at, mask)
    else:
        tile = tl.load(p_codes + at, mask=mask, other=0.0)
    return tile


@triton.jit
def gated(gate, up, alpha, limit, CLAMPED: tl.constexpr):
    """Computes silu(gate) * up, or the clamped activation of gpt-oss."""
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        out = gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
    else:
        out = gate / (1.0 + tl.exp(-gate)) * up
    return out


@triton.jit
def mxfp4_tile(p_codes, p_scales, at, mask):
    """Loads 4-bit numbers at inputs `at` of rows, in fp32; see `kernels.mxfp4_weight`."""
    byte = tl.load(p_codes + at // 2, mask=mask, other=0).to(tl.int32)
    code = (byte >> (at % 2) * 4) & 15
    exponent = (code >> 1) & 3
    half = code & 1
    # 0.5 has the exponent field 126 and no mantissa; the others e + 126 and their mantissa on top.
    small = half * (126 << 23)
    bits = tl.where(exponent == 0, small, ((exponent + 126) << 23) | (half << 22)) | ((code >> 3) << 31)
    scale = tl.load(p_scales + at // 32, mask=mask, other=127).to(tl.int32) << 23
    return bits.to(tl.float32, bitcast=True) * scale.to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=STEP_ARGS)
def moe_gemm_kernel(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    rows_ptr,
    ends_ptr,
    out_ptr,
    num_blocks,
    n,
    k,
    num_experts,
    entries_per_x,
    alpha,
    limit,
    GATED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CLAMPED: tl.constexpr,
    MXFP4: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    DEPTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Computes COLS columns of one block of rows with the weights of its expert."""
    block, pid_n = swizzled(tl.program_id(0), num_blocks, tl.cdiv(n, COLS), GROUP)
    o_e = tl.arange(0, EXPERTS)
    b_end = tl.load(ends_ptr + o_e, mask=o_e < num_experts, other=2147483647)
    expert = tl.sum((b_end <= block * ROWS).to(tl.int32), 0).to(
        tl.int64
    )  # experts that end before this block
    if expert >= num_experts:
        return
    b_entry = tl.load(rows_ptr + block * ROWS + tl.arange(0, ROWS))
    m_r = b_entry >= 0
    o_n = pid_n * COLS + tl.arange(0, COLS)
    o_k = tl.arange(0, DEPTH)
    m_n = o_n < n
    p_x = x_ptr + (b_entry // entries_per_x)[:, None].to(tl.int64) * k
    stride_e = n * 2 if GATED else n
    row = expert * stride_e + o_n[None, :]
    codes = k // 2 if MXFP4 else k
    blocks = k // 32 if MXFP4 else 0
    p_w = weight_ptr + row * codes
    p_s = scales_ptr + row * blocks
    up_codes = tl.cast(n, tl.int64) * codes
    up_scales = tl.cast(n, tl.int64) * blocks
    b_acc = tl.zeros([ROWS, COLS], dtype=tl.float32)
    b_up_acc = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for start in range(0, k, DEPTH):
        at = start + o_k
        b_x = tl.load(p_x + at[None, :], mask=m_r[:, None] & (at < k)[None, :], other=0.0)  # [ROWS, DEPTH]
        m_w = (at < k)[:, None] & m_n[None, :]
        b_acc = tl.dot(b_x, weight_tile(p_w, p_s, at[:, None], m_w, MXFP4).to(b_x.dtype), b_acc)
        if GATED:
            b_w = weight_tile(p_w + up_codes, p_s + up_scales, at[:, None], m_w, MXFP4)
            b_up_acc = tl.dot(b_x, b_w.to(b_x.dtype), b_up_acc)
    if HAS_SCALES:
        p_scales = scales_ptr + expert * stride_e + o_n
        b_acc *= tl.load(p_scales, mask=m_n, other=0.0)[None, :]
        if GATED:
            b_up_acc *= tl.load(p_scales + n, mask=m_n, other=0.0)[None, :]
    if HAS_BIAS:
        p_bias = bias_ptr + expert * stride_e + o_n
        b_acc += tl.load(p_bias, mask=m_n, other=0.0).to(tl.float32)[None, :]
        if GATED:
            b_up_acc += tl.load(p_bias + n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    if GATED:
        b_acc = gated(b_acc, b_up_acc, alpha, limit, CLAMPED)
    p_out = out_ptr + b_entry[:, None].to(tl.int64) * n + o_n[None, :]
    tl.store(p_out, b_acc.to(out_ptr.dtype.element_ty), mask=m_r[:, None] & m_n[None, :])


@triton.jit
def moe_combine_kernel(
    y_ptr, weights_ptr, experts_ptr, out_ptr, hidden, CHOICES: tl.constexpr, TILE: tl.constexpr
):
    """Sums the outputs of a token's experts by their weights; a choice of -1 adds nothing."""
    token = tl.program_id(0).to(tl.int64)
    o_h = tl.program_id(1) * TILE + tl.arange(0, TILE)
    b_sum = tl.zeros([TILE], dtype=tl.float32)
    for j in tl.static_range(CHOICES):
        here = tl.load(experts_ptr + token * CHOICES + j) >= 0
        b_y = tl.load(y_ptr + (token * CHOICES + j) * hidden + o_h, mask=(o_h < hidden) & here, other=0.0)
        b_sum += tl.load(weights_ptr + token * CHOICES + j) * b_y.to(tl.float32)
    tl.store(out_ptr + token * hidden + o_h, b_sum.to(out_ptr.dtype.element_ty), mask=o_h < hidden)
