"""Rotary positions (Su et al. 2021) on queries and keys, fused with the write of both caches.

For pair i of a head, with angle a = position * frequency_i: (x1, x2) -> (x1 cos a - x2 sin a, x2 cos a + x1
sin a). neox pairs (i, i + R/2), gptj pairs (2i, 2i + 1); dimensions from R on pass through. Rotated queries
replace the queries; rotated keys go only to the cache, quantised on the way where the cache is int8 or fp8.
Nothing is read twice: memory bandwidth bounds it (queries read and written, keys and values read and written
once). Shapes: T tokens, H query heads, Hk KV heads, D head_dim, R rotary dimensions, P positions of the
table. Cache: [num_blocks, block_size, Hk, D]; slot = block * block_size + offset, -1: not written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.case import Case
from kernels.launch import INTERPRETER, launch, target

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUANTISED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest value that a code stands for
MAX_HEAD_DIM = 512
SMALLEST = 1e-10  # largest magnitude of a head below which its scale stays put: no division by zero


class Tiles(NamedTuple):
    """Elements (heads times half a head_dim) of queries that a program rotates, and its warps."""

    head_tile: int
    num_warps: int


TILES = {
    "sm_80": Tiles(1024, 4),
    "sm_90": Tiles(1024, 4),
    "gfx942": Tiles(1024, 4),
    INTERPRETER: Tiles(4096, 4),
}


def rope_and_write_kv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """Rotate q [T, H, D] in place, write rotated k and v [T, Hk, D] into the cache at `slots`; returns q.

    q, k, v: fp32, fp16 or bf16, one dtype; tokens may be apart (views of one projection), a token's heads
    not; k itself stays as it is. positions and slots [T] int32 or int64; cos_sin [P, R] fp32 of
    `cos_sin_table`, R even, at most D. interleaved: gptj pairs. Caches of q's dtype, or both int8 or
    float8_e4m3fn with key_scales and value_scales [num_blocks, block_size, Hk] fp32: per token and head,
    largest magnitude / 127 (448 in fp8). Two tokens must not share a slot. Raises ValueError on anything
    else, and for fp8 on a chip without it.
    """
    scales = _check(q, k, v, positions, cos_sin, key_cache, value_cache, slots, key_scales, value_scales)
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    half = cos_sin.shape[1] // 2
    tiles = TILES.get(target(), TILES["sm_90"])
    half_block = triton.next_power_of_2(half)
    q_heads = max(1, min(triton.next_power_of_2(num_q_heads), tiles.head_tile // half_block))
    q_groups = triton.cdiv(num_q_heads, q_heads)
    kv_heads = max(1, min(triton.next_power_of_2(num_kv_heads), tiles.head_tile // half_block))
    launch(
        rope_and_write_kv_kernel,
        (num_tokens, q_groups + triton.cdiv(num_kv_heads, kv_heads)),
        q,
        k,
        v,
        positions,
        cos_sin,
        key_cache,
        value_cache,
        slots,
        *scales,
        q.stride(0),
        k.stride(0),
        v.stride(0),
        num_q_heads,
        num_kv_heads,
        q_groups,
        HEAD_DIM=head_dim,
        HALF=half,
        BLOCK_HALF=half_block,
        BLOCK_REST=triton.next_power_of_2(head_dim - 2 * half) if head_dim > 2 * half else 0,
        BLOCK_D=triton.next_power_of_2(head_dim),
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        INTERLEAVED=interleaved,
        LARGEST=QUANTISED.get(key_cache.dtype, 0.0),
        ROUND=key_cache.dtype == torch.int8,
        SMALL=SMALLEST,
        num_warps=tiles.num_warps,
    )
    return q


def cos_sin_table(
    rotary_dim: int,
    num_positions: int,
    *,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """[num_positions, rotary_dim] fp32: cosines of the rotary_dim / 2 angles, then their sines.

    scaling: the `rope_scaling` of a config.json: types default, linear, llama3 (Llama 3.1) and yarn (Peng et
    al. 2023, with the attention factor multiplied in). Raises ValueError on other types and missing settings.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim={rotary_dim}: must be even and at least 2")
    frequencies, factor = rope_frequencies(rotary_dim, base, scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * factor).to(device=device, dtype=torch.float32)


def rope_frequencies(
    rotary_dim: int, base: float, scaling: Mapping[str, Any] | None = None
) -> tuple[torch.Tensor, float]:
    """(Radians a position [rotary_dim / 2] in fp64, factor on cosine and sine).

    Unscaled: base^(-2 i / rotary_dim); rotary_dim 4, base 10000: 1 and 0.01.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    # In fp32, as models were trained: positions amplify the last bits.
    plain = (1.0 / (base ** exponents.float())).double()
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind in ("default", None):
        return plain, 1.0
    try:
        if kind == "linear":
            return plain / scaling["factor"], 1.0
        if kind == "llama3":
            return _llama3(plain, scaling), 1.0
        if kind == "yarn":
            return _yarn(plain, rotary_dim, base, scaling)
    except KeyError as error:
        raise ValueError(f"rope_scaling of type {kind!r} lacks {error}: {dict(scaling)}") from None
    raise ValueError(f"rope_scaling type {kind!r}: default, linear, llama3 and yarn are supported")


def _llama3(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long waves slowed by `factor`, short ones kept, those between blended (Llama 3.1 model card)."""
    context = scaling["original_max_position_embeddings"]
    turns = context * plain / (2 * math.pi)  # in the original context
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1 - kept) * plain / scaling["factor"]


def _yarn(
    plain: torch.Tensor, rotary_dim: int, base: float, scaling: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """Dimensions that turn more than beta_fast times are kept, under beta_slow slowed; a ramp between."""
    factor, context = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_of(turns: float) -> float:
        return rotary_dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair_of(scaling.get("beta_fast") or 32), pair_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float64) - low) / (high - low if high != low else 0.001)
    interpolated = ramp.clamp(0.0, 1.0)
    frequencies = interpolated * plain / factor + (1 - interpolated) * plain

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    given = scaling.get("attention_factor")
    if given is None and scaling.get("mscale") and scaling.get("mscale_all_dim"):
        given = magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
    return frequencies, float(magnitude(1.0) if given is None else given)


@triton.jit
def load_pairs(ptr, heads, num_heads, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_HALF: tl.constexpr,
               INTERLEAVED: tl.constexpr):  # fmt: skip
    """Both members of every pair of `heads`, in fp32: two of [heads, BLOCK_HALF]."""
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
    """x / scale within the range of the code; half up where it is an integer."""
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
            k_to = key_cache_ptr + slot * num_kv_heads * HEAD_DIM
            a, b = load_pairs(k_at, heads, num_kv_heads, HEAD_DIM, HALF, BLOCK_HALF, INTERLEAVED)
            first = a * cos - b * sin
            second = b * cos + a * sin
            dims = tl.arange(0, BLOCK_D)[None, :]
            v_mask = (heads < num_kv_heads) & (dims < HEAD_DIM)
            v = tl.load(v_ptr + token * stride_v + heads * HEAD_DIM + dims, mask=v_mask, other=0.0).to(
                tl.float32
            )
            if BLOCK_REST > 0:
                rest_dims = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
                rest_mask = (heads < num_kv_heads) & (rest_dims < HEAD_DIM)
                rest = tl.load(k_at + heads * HEAD_DIM + rest_dims, mask=rest_mask, other=0.0).to(tl.float32)
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


def rope_and_write_kv_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    interleaved: bool = False,
) -> torch.Tensor:
    """What rope_and_write_kv must do, in place as well."""
    at = cos_sin.index_select(0, positions)
    both = rotated(torch.cat([q, k], dim=1), at, interleaved)  # at once: of few tokens every call counts
    new_q, new_k = both.split([q.shape[1], k.shape[1]], dim=1)
    new_v, to = v, slots.long()
    if min(slots.tolist(), default=0) < 0:
        written = slots >= 0
        new_k, new_v, to = new_k[written], new_v[written], to[written]
    for x, cache, scales in ((new_k, key_cache, key_scales), (new_v, value_cache, value_scales)):
        codes = x
        if scales is not None:
            codes, scale = quantise_heads(x, cache.dtype)
            scales.view(-1, scales.shape[-1]).index_copy_(0, to, scale)
        rows, codes = cache.view(-1, *cache.shape[2:]), codes.to(cache.dtype)
        if cache.dtype.itemsize == 1:  # fp8 has no indexed assignment everywhere
            rows, codes = rows.view(torch.uint8), codes.view(torch.uint8)
        rows.index_copy_(0, to, codes)
    return q.copy_(new_q)


def rotated(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """x [T, H, D] turned by its tokens' rows of the table, cos_sin [T, R]: fp32."""
    wide, size = x.float(), cos_sin.shape[-1]
    cos, sin = cos_sin[:, None, :].chunk(2, dim=-1)
    if interleaved:
        first, second = wide[..., 0:size:2], wide[..., 1:size:2]
    else:
        first, second = wide[..., : size // 2], wide[..., size // 2 : size]
    pair = (first * cos).addcmul_(second, sin, value=-1), (second * cos).addcmul_(first, sin)
    turned = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return turned if size == x.shape[-1] else torch.cat([turned, wide[..., size:]], dim=-1)


def quantise_heads(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales): each head's vector, the last dimension, over its largest magnitude; codes in fp32."""
    largest = QUANTISED[dtype]
    scale = x.float().abs().amax(dim=-1).clamp(min=SMALLEST) / largest
    codes = x.float() / scale[..., None]
    if dtype == torch.int8:
        codes = torch.floor(codes + 0.5)
    return codes.clamp(-largest, largest), scale


def cases() -> Iterator[Case]:
    """SmolLM2-135M, Qwen3-0.6B, Llama-3.1-8B; quantised caches; gptj pairs; a partial rotation."""
    bf16, int8, fp8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
    for num_tokens, heads, kv_heads, head_dim, rotary, dtype, interleaved in (
        (1, 9, 3, 64, 64, bf16, False),
        (64, 16, 8, 128, 128, bf16, False),
        (1, 32, 8, 128, 128, bf16, False),
        (64, 32, 8, 128, 128, bf16, False),
        (2048, 32, 8, 128, 128, bf16, False),
        (64, 32, 8, 128, 128, int8, False),
        (64, 32, 8, 128, 128, fp8, False),
        (64, 32, 8, 128, 128, bf16, True),
        (64, 32, 32, 80, 32, bf16, False),
    ):
        kind = {bf16: "", int8: "-int8", fp8: "-fp8"}[dtype] + ("-gptj" if interleaved else "")
        name = f"rope-{num_tokens}x{heads}+{kv_heads}x{head_dim}{kind}"
        kv_bytes = 2 * kv_heads * head_dim * (2 + dtype.itemsize)
        moved = float(num_tokens * (4 * heads * head_dim + kv_bytes))
        yield Case(name, _case(num_tokens, heads, kv_heads, head_dim, rotary, dtype, interleaved), moved)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    positions: torch.Tensor,
    cos_sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    num_tokens, _, head_dim = q.shape
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or x.dtype not in DTYPES or x.dtype != q.dtype or x.shape[::2] != q.shape[::2]:
            raise ValueError(
                f"{name}: {x.dtype} {list(x.shape)}; must be [tokens, heads, head_dim] like q, {q.dtype} "
                f"{list(q.shape)}, in fp32, fp16 or bf16"
            )
        if num_tokens and (x.stride(2) != 1 or x.stride(1) != head_dim):
            raise ValueError(f"{name}: strides {x.stride()}; a token's heads must lie together")
    if k.shape != v.shape:
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)} must have one shape")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim}: at most {MAX_HEAD_DIM} is supported")
    if cos_sin.dim() != 2 or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        raise ValueError(
            f"cos_sin: {cos_sin.dtype} {list(cos_sin.shape)}; must be contiguous fp32 [positions, R]"
        )
    if cos_sin.shape[1] % 2 or not 0 < cos_sin.shape[1] <= head_dim:
        raise ValueError(f"cos_sin: {cos_sin.shape[1]} rotary dimensions; must be even, at most {head_dim}")
    for name, x in (("positions", positions), ("slots", slots)):
        if x.shape != (num_tokens,) or x.dtype not in (torch.int32, torch.int64) or not x.is_contiguous():
            raise ValueError(f"{name}: {x.dtype} {list(x.shape)}; must be contiguous integers [{num_tokens}]")
    for name, x in (("key_cache", key_cache), ("value_cache", value_cache)):
        if x.dim() != 4 or x.shape[2:] != k.shape[1:] or x.shape != key_cache.shape or not x.is_contiguous():
            raise ValueError(
                f"{name} {list(x.shape)}: must be contiguous [num_blocks, block_size, {k.shape[1]}, "
                f"{head_dim}]"
            )
        if x.dtype != key_cache.dtype or (x.dtype not in QUANTISED and x.dtype != q.dtype):
            raise ValueError(
                f"{name}: {x.dtype}; {q.dtype}, int8 and float8_e4m3fn are supported, one for both"
            )
    return _checked_scales(key_cache, key_scales, value_scales)


def _checked_scales(
    cache: torch.Tensor, key_scales: torch.Tensor | None, value_scales: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    for name, x in (("key_scales", key_scales), ("value_scales", value_scales)):
        if (x is None) == (cache.dtype in QUANTISED):
            raise ValueError(
                f"{name}: needed for an int8 or fp8 cache and for no other; the cache is {cache.dtype}"
            )
        if x is not None and (
            x.shape != cache.shape[:3] or x.dtype != torch.float32 or not x.is_contiguous()
        ):
            raise ValueError(f"{name} {list(x.shape)}: must be contiguous fp32 {list(cache.shape[:3])}")
    if cache.dtype == torch.float8_e4m3fn and target().startswith("sm_") and int(target()[3:]) < 89:
        raise ValueError(f"float8_e4m3fn cache on {target()}: needs sm_89 or newer; int8 is supported there")
    return key_scales, value_scales


def _case(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    dtype: torch.dtype,
    interleaved: bool,
) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        merged = torch.randn(
            num_tokens, num_heads + 2 * num_kv_heads, head_dim, device=device, dtype=torch.bfloat16
        )
        q, k, v = merged.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        num_blocks = num_tokens // 16 + 2
        caches = [
            torch.empty(num_blocks, 16, num_kv_heads, head_dim, device=device, dtype=dtype) for _ in range(2)
        ]
        scales: list[torch.Tensor | None] = [None, None]
        if dtype in QUANTISED:
            scales = [torch.empty(num_blocks, 16, num_kv_heads, device=device) for _ in range(2)]
        positions = torch.arange(num_tokens, device=device)
        table = cos_sin_table(rotary_dim, 4096, device=device)
        return lambda: rope_and_write_kv(
            q,
            k,
            v,
            positions,
            table,
            caches[0],
            caches[1],
            positions + 16,
            key_scales=scales[0],
            value_scales=scales[1],
            interleaved=interleaved,
        )

    return make
