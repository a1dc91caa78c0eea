"""KV in 4 bits: two codes in each byte, with a scale and a least value for each token and head.

Quantisation is asymmetric: x is about code * scale + least, with codes from 0 to 15, where least is the
smallest element of the head and scale the 15th part of its range. Both are rounded to fp16 before the codes
are computed. Codes 2i and 2i + 1 of a head are the lower and the upper half of byte i. A head of 128 takes 64
+ 4 bytes, 27 % of bf16's 256.

Caches are uint8 [N, P, K, D / 2], scales fp16 [N, P, K, 2]: scale, then least. Kernels dequantise in
registers, in fp32, and round to the queries' dtype, as the reference does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MOST_CODE = tl.constexpr(15.0)
SMALLEST_SCALE = tl.constexpr(2.0**-14)  # the smallest normal number of fp16
LARGEST = tl.constexpr(32752.0)  # half of fp16's largest number: so the range fits, too


def quantise_int4_heads(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes, uint8 [..., D / 2], and scale and least value, fp16 [..., 2], of vectors [..., D]."""
    wide = x.float().clamp(-LARGEST.value, LARGEST.value)
    least = wide.amin(-1).half()
    scale = ((wide.amax(-1) - least.float()) / MOST_CODE.value).clamp(min=SMALLEST_SCALE.value).half()
    codes = torch.floor((wide - least.float()[..., None]) / scale.float()[..., None] + 0.5)
    codes = codes.clamp(0.0, MOST_CODE.value).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, torch.stack([scale, least], -1)


def dequantise_int4_heads(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Returns the vectors [..., D] in fp32 of codes [..., D / 2] and scales [..., 2]."""
    wide = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).float()
    return wide * scales[..., :1].float() + scales[..., 1:].float()


@triton.jit
def loaded_int4(
    cache_ptr, scales_ptr, row, scale_row, there, dtype: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr
):  # fmt: skip
    """Returns keys or values of a 4-bit cache, [rows, BLOCK_D], in `dtype`; there: rows to read, None: all.

    row: first byte of each row in the cache; scale_row: its index among the scales.
    """
    pair = tl.arange(0, BLOCK_D // 2)
    if there is None:
        ok = None if HEAD_DIM == BLOCK_D else (pair < HEAD_DIM // 2)[None, :]
        pairs = tl.load(cache_ptr + row[:, None] + pair[None, :], mask=ok, other=None if ok is None else 0)
        scale = tl.load(scales_ptr + 2 * scale_row).to(tl.float32)
        least = tl.load(scales_ptr + 2 * scale_row + 1).to(tl.float32)
    else:
        ok = there[:, None] & (pair < HEAD_DIM // 2)[None, :]
        pairs = tl.load(cache_ptr + row[:, None] + pair[None, :], mask=ok, other=0)
        scale = tl.load(scales_ptr + 2 * scale_row, mask=there, other=0.0).to(tl.float32)
        least = tl.load(scales_ptr + 2 * scale_row + 1, mask=there, other=0.0).to(tl.float32)
    codes = tl.reshape(tl.join(pairs & 15, pairs >> 4), (row.shape[0], BLOCK_D)).to(tl.float32)
    return (codes * scale[:, None] + least[:, None]).to(dtype)


@triton.jit
def _coded(x, scale, least):
    """Returns the codes of a head's elements [heads, elements], in int32."""
    codes = tl.floor((x - least[:, None]) / scale[:, None] + 0.5)
    return tl.minimum(tl.maximum(codes, 0.0), MOST_CODE).to(tl.int32)


@triton.jit
def _store_packed(ptr, heads, num_heads, codes, FROM: tl.constexpr, COUNT: tl.constexpr,
                  HEAD_DIM: tl.constexpr):  # fmt: skip
    """Stores codes [heads, elements], of which COUNT exist, from element FROM of each head on."""
    width: tl.constexpr = codes.shape[1] // 2
    low, high = tl.split(tl.reshape(codes, (codes.shape[0], width, 2)))
    _store_bytes(ptr, heads, num_heads, low, high, FROM, COUNT, HEAD_DIM)


@triton.jit
def _store_bytes(ptr, heads, num_heads, low, high, FROM: tl.constexpr, COUNT: tl.constexpr,
                 HEAD_DIM: tl.constexpr):  # fmt: skip
    """Stores the lower and upper halves [heads, bytes] of COUNT / 2 bytes from element FROM on."""
    at = tl.arange(0, low.shape[1])[None, :]
    mask = (heads < num_heads) & (at < COUNT // 2)
    packed = (low | high << 4).to(tl.uint8)
    tl.store(ptr + heads * (HEAD_DIM // 2) + FROM // 2 + at, packed, mask=mask)


@triton.jit
def _extremes(x, COUNT: tl.constexpr):
    """Returns the smallest and largest of the first COUNT elements of each head, within fp16's range."""
    there = tl.arange(0, x.shape[1])[None, :] < COUNT
    x = tl.minimum(tl.maximum(x, -LARGEST), LARGEST)
    return tl.min(tl.where(there, x, LARGEST), axis=1), tl.max(tl.where(there, x, -LARGEST), axis=1)


@triton.jit
def _store_scales(ptr, kv_head, num_heads, least, most):
    """Stores scale and least value of each head, and returns them as they were rounded."""
    least = least.to(tl.float16).to(tl.float32)
    scale = tl.maximum((most - least) / MOST_CODE, SMALLEST_SCALE).to(tl.float16)
    tl.store(ptr + 2 * kv_head, scale, mask=kv_head < num_heads)
    tl.store(ptr + 2 * kv_head + 1, least.to(tl.float16), mask=kv_head < num_heads)
    return scale.to(tl.float32), least


@triton.jit
def store_int4(
    key_ptr, value_ptr, key_scales_ptr, value_scales_ptr, kv_head, num_heads, first, second, rest, v,
    HEAD_DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):  # fmt: skip
    """Quantises and stores the heads kv_head [heads] of one token; pointers are those of its slot.

    first, second: members of the rotated pairs of keys, [heads, HALF padded]; rest: keys' other elements, or
    None; v: values [heads, HEAD_DIM padded].
    """
    heads = kv_head[:, None]
    least, most = _extremes(first, HALF)
    low, high = _extremes(second, HALF)
    least = tl.minimum(least, low)
    most = tl.maximum(most, high)
    if rest is not None:
        low, high = _extremes(rest, HEAD_DIM - 2 * HALF)
        least = tl.minimum(least, low)
        most = tl.maximum(most, high)
    scale, least = _store_scales(key_scales_ptr, kv_head, num_heads, least, most)
    first = _coded(first, scale, least)
    second = _coded(second, scale, least)
    if INTERLEAVED:
        _store_bytes(key_ptr, heads, num_heads, first, second, 0, 2 * HALF, HEAD_DIM)
    else:
        _store_packed(key_ptr, heads, num_heads, first, 0, HALF, HEAD_DIM)
        _store_packed(key_ptr, heads, num_heads, second, HALF, HALF, HEAD_DIM)
    if rest is not None:
        codes = _coded(rest, scale, least)
        _store_packed(key_ptr, heads, num_heads, codes, 2 * HALF, HEAD_DIM - 2 * HALF, HEAD_DIM)
    least, most = _extremes(v, HEAD_DIM)
    scale, least = _store_scales(value_scales_ptr, kv_head, num_heads, least, most)
    _store_packed(value_ptr, heads, num_heads, _coded(v, scale, least), 0, HEAD_DIM, HEAD_DIM)
