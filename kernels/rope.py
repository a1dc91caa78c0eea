"""Rotary position embedding (Su et al. 2021) of queries and keys, fused with the write to the KV cache.

Pair i of a head, with angle a = position * frequency_i, becomes (x1 cos a - x2 sin a, x2 cos a + x1 sin a).
The neox style pairs (i, i + R/2), the gptj style (2i, 2i + 1); dimensions from R on are not changed. Rotated
queries replace the queries; rotated keys are written only to the cache, quantised if the cache is int8, fp8
or 4 bits (`kernels.int4_kv`). The kernel is memory-bound: queries, keys and values are read once and written
once. Shapes: T tokens, H query heads, Hk KV heads, D head_dim, R rotary dimensions, P positions of the table.
Cache: [num_blocks, block_size, Hk, D]; slot = block * block_size + offset; -1: not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import triton

from kernels.case import Case
from kernels.int4_kv import quantise_int4_heads
from kernels.launch import INTERPRETER, launch, target
from kernels.paged_kv import INT4, QUANTISED, PagedKv, scales_of, vector_bytes
from kernels.rope_angles import cos_sin_table
from kernels.rope_kernels import rope_and_write_kv_kernel

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MAX_HEAD_DIM = 512
SMALLEST = (
    1e-10  # lower bound of the magnitude from which a head's scale is computed, against division by zero
)


class Tiles(NamedTuple):
    """Elements (heads times half a head_dim) that a program loads at once, and its number of warps.

    A program of queries loads the rotated dimensions only, one of keys and values all of them.
    """

    head_tile: int
    num_warps: int


TILES = {
    "sm_80": Tiles(1024, 4),
    "sm_90": Tiles(1024, 4),
    "gfx942": Tiles(1024, 4),
    INTERPRETER: Tiles(4096, 4),
}


class Rotation(NamedTuple):
    """Rotation of each token's heads: positions and the table of angles."""

    positions_T: torch.Tensor
    """Position of each token, int32 or int64."""
    cos_sin_PR: torch.Tensor
    """Table of `cos_sin_table`, fp32; R even, at most D."""
    interleaved: bool = False
    """gptj pairs (2i, 2i + 1) if true, else neox pairs (i, i + R/2)."""


def rope_and_write_kv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation, kv: PagedKv, slots: torch.Tensor
) -> torch.Tensor:
    """Rotates q [T, H, D] in place, writes rotated k and v [T, Hk, D] to the cache at `slots`; returns q.

    q, k, v: fp32, fp16 or bf16, of one dtype; tokens may have any stride (views of one projection), a token's
    heads are contiguous; k itself is not changed. slots: [T] int32 or int64, all different. The scales of a
    quantised cache are set per token and head: largest magnitude / 127 (448 in fp8), or those of 4 bits.
    Raises ValueError for unsupported arguments, and for fp8 on a chip without it.
    """
    _check(q, k, v, rotation, kv, slots)
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    half = rotation.cos_sin_PR.shape[1] // 2
    tiles = TILES.get(target(), TILES["sm_90"])
    half_block = triton.next_power_of_2(half)
    q_heads = max(1, min(triton.next_power_of_2(num_q_heads), tiles.head_tile // half_block))
    q_groups = triton.cdiv(num_q_heads, q_heads)
    block_d = triton.next_power_of_2(head_dim)
    kv_heads = max(1, min(triton.next_power_of_2(num_kv_heads), 2 * tiles.head_tile // block_d))
    launch(
        rope_and_write_kv_kernel,
        (num_tokens, q_groups + triton.cdiv(num_kv_heads, kv_heads)),
        q,
        k,
        v,
        rotation.positions_T,
        rotation.cos_sin_PR,
        kv.keys,
        kv.values,
        slots,
        kv.key_scales,
        kv.value_scales,
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
        BLOCK_D=block_d,
        Q_HEADS=q_heads,
        KV_HEADS=kv_heads,
        INTERLEAVED=rotation.interleaved,
        LARGEST=QUANTISED.get(kv.keys.dtype, 0.0),
        ROUND=kv.keys.dtype == torch.int8,
        SMALL=SMALLEST,
        num_warps=tiles.num_warps,
    )
    return q


def rope_and_write_kv_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation, kv: PagedKv, slots: torch.Tensor
) -> torch.Tensor:
    """Computes the reference of `rope_and_write_kv` in torch, also in place."""
    at = rotation.cos_sin_PR.index_select(0, rotation.positions_T)
    # Both in one call: with few tokens, the time is that of the calls.
    both = rotated(torch.cat([q, k], dim=1), at, rotation.interleaved)
    new_q, new_k = both.split([q.shape[1], k.shape[1]], dim=1)
    new_v, to = v, slots.long()
    if min(slots.tolist(), default=0) < 0:
        written = slots >= 0
        new_k, new_v, to = new_k[written], new_v[written], to[written]
    for x, cache, scales in ((new_k, kv.keys, kv.key_scales), (new_v, kv.values, kv.value_scales)):
        codes = x
        if scales is not None:
            codes, scale = quantise_heads(x, cache.dtype)
            scales.view(-1, *scales.shape[2:]).index_copy_(0, to, scale)
        rows, codes = cache.view(-1, *cache.shape[2:]), codes.to(cache.dtype)
        if cache.dtype.itemsize == 1:  # index assignment of fp8 is not always supported
            rows, codes = rows.view(torch.uint8), codes.view(torch.uint8)
        rows.index_copy_(0, to, codes)
    return q.copy_(new_q)


def rotated(x: torch.Tensor, cos_sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Returns x [T, H, D] rotated by its tokens' rows of the table, cos_sin [T, R], in fp32."""
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
    """Returns (codes, scales): each head's vector over its largest magnitude, in fp32; or 4-bit codes."""
    if dtype == INT4:
        return quantise_int4_heads(x)
    largest = QUANTISED[dtype]
    scale = x.float().abs().amax(dim=-1).clamp(min=SMALLEST) / largest
    codes = x.float() / scale[..., None]
    if dtype == torch.int8:
        codes = torch.floor(codes + 0.5)
    return codes.clamp(-largest, largest), scale


def cases() -> Iterator[Case]:
    """Yields SmolLM2-135M, Qwen3-0.6B, Llama-3.1-8B; quantised caches; gptj style; a partial rotation."""
    bf16, int8, fp8 = torch.bfloat16, torch.int8, torch.float8_e4m3fn
    for num_tokens, heads, kv_heads, head_dim, rotary, dtype, interleaved in (
        (1, 9, 3, 64, 64, bf16, False),
        (64, 16, 8, 128, 128, bf16, False),
        (1, 32, 8, 128, 128, bf16, False),
        (64, 32, 8, 128, 128, bf16, False),
        (2048, 32, 8, 128, 128, bf16, False),
        (64, 32, 8, 128, 128, int8, False),
        (64, 32, 8, 128, 128, fp8, False),
        (64, 32, 8, 128, 128, INT4, False),
        (64, 32, 8, 128, 128, bf16, True),
        (64, 32, 8, 128, 128, INT4, True),
        (64, 32, 32, 80, 32, bf16, False),
        (64, 32, 32, 80, 32, INT4, False),
    ):
        kind = {bf16: "", int8: "-int8", fp8: "-fp8", INT4: "-int4"}[dtype] + ("-gptj" if interleaved else "")
        name = f"rope-{num_tokens}x{heads}+{kv_heads}x{head_dim}{kind}"
        kv_bytes = 2 * kv_heads * (2 * head_dim + vector_bytes(head_dim, dtype))
        moved = float(num_tokens * (4 * heads * head_dim + kv_bytes))
        yield Case(name, _case(num_tokens, heads, kv_heads, head_dim, rotary, dtype, interleaved), moved)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rotation: Rotation, kv: PagedKv, slots: torch.Tensor
) -> None:
    positions, cos_sin, _ = rotation
    num_tokens, _, head_dim = q.shape
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 3 or x.dtype not in DTYPES or x.dtype != q.dtype or x.shape[::2] != q.shape[::2]:
            raise ValueError(
                f"{name}: {x.dtype} {list(x.shape)}; must be [tokens, heads, head_dim] like q, {q.dtype} "
                f"{list(q.shape)}, in fp32, fp16 or bf16"
            )
        if num_tokens and (x.stride(2) != 1 or x.stride(1) != head_dim):
            raise ValueError(f"{name}: strides {x.stride()}; the heads of a token must be contiguous")
    if k.shape != v.shape:
        raise ValueError(f"k {list(k.shape)} and v {list(v.shape)}: must have the same shape")
    if head_dim > MAX_HEAD_DIM:
        raise ValueError(f"head_dim {head_dim}: must be at most {MAX_HEAD_DIM}")
    if cos_sin.dim() != 2 or cos_sin.dtype != torch.float32 or not cos_sin.is_contiguous():
        raise ValueError(
            f"cos_sin: {cos_sin.dtype} {list(cos_sin.shape)}; must be contiguous fp32 [positions, R]"
        )
    if kv.keys.dtype == INT4 and cos_sin.shape[1] % 4:
        raise ValueError(
            f"cos_sin: {cos_sin.shape[1]} rotary dimensions; must be a multiple of 4 with a 4-bit cache, "
            "which has two dimensions in a byte"
        )
    if cos_sin.shape[1] % 2 or not 0 < cos_sin.shape[1] <= head_dim:
        raise ValueError(f"cos_sin: {cos_sin.shape[1]} rotary dimensions; must be even, at most {head_dim}")
    for name, x in (("positions", positions), ("slots", slots)):
        if x.shape != (num_tokens,) or x.dtype not in (torch.int32, torch.int64) or not x.is_contiguous():
            raise ValueError(f"{name}: {x.dtype} {list(x.shape)}; must be contiguous integers [{num_tokens}]")
    _check_caches(kv, q, k)
    _check_scales(kv)


def _check_caches(kv: PagedKv, q: torch.Tensor, k: torch.Tensor) -> None:
    for name, x in (("key_cache", kv.keys), ("value_cache", kv.values)):
        stored = torch.Size((k.shape[1], k.shape[2] // 2 if x.dtype == INT4 else k.shape[2]))
        if x.dim() != 4 or x.shape[2:] != stored or x.shape != kv.keys.shape or not x.is_contiguous():
            raise ValueError(
                f"{name} {list(x.shape)}: must be contiguous [num_blocks, block_size, {stored[0]}, "
                f"{stored[1]}]"
            )
        if x.dtype != kv.keys.dtype or (x.dtype not in QUANTISED and x.dtype != q.dtype):
            raise ValueError(
                f"{name}: {x.dtype}; must be {q.dtype}, int8, float8_e4m3fn or uint8 (4 bits), the same for "
                "both caches"
            )


def _check_scales(kv: PagedKv) -> None:
    cache = kv.keys
    for name, x in (("key_scales", kv.key_scales), ("value_scales", kv.value_scales)):
        if (x is None) == (cache.dtype in QUANTISED):
            raise ValueError(
                f"{name}: must be given for an int8, fp8 or 4-bit cache and for no other; the cache is "
                f"{cache.dtype}"
            )
        shape, dtype = scales_of(tuple(cache.shape), cache.dtype)
        if x is not None and (x.shape != shape or x.dtype != dtype or not x.is_contiguous()):
            raise ValueError(f"{name} {x.dtype} {list(x.shape)}: must be contiguous {dtype} {list(shape)}")
    if cache.dtype == torch.float8_e4m3fn and target().startswith("sm_") and int(target()[3:]) < 89:
        raise ValueError(f"float8_e4m3fn cache on {target()}: needs sm_89 or newer; use int8")


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
        positions = torch.arange(num_tokens, device=device)
        table = cos_sin_table(rotary_dim, 4096, device=device)
        rotation = Rotation(positions, table, interleaved)
        kv = PagedKv.zeros((num_blocks, 16, num_kv_heads, head_dim), dtype, device)
        return lambda: rope_and_write_kv(q, k, v, rotation, kv, positions + 16)

    return make
