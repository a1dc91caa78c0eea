"""Positions of multi-head latent attention: rotates the queries, and writes each token's row of the cache.

A row of the cache has the token's latent numbers, normalised (RMSNorm), then its rotated key, which all heads
share. The kernel is memory-bound: each number is read once and written once. Shapes: T tokens, H query heads,
R rope_dim, V latent_dim, C = V + R, N blocks, P block_size; slot = block * P + offset; -1: not written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.attention import DTYPES
from kernels.attention_models import made
from kernels.case import Case
from kernels.launch import launch
from kernels.mla_decode import LATENT_DIMS, ROPE_DIMS
from kernels.rope import Rotation, rotated
from kernels.rope_angles import cos_sin_table

HEADS_TILE = 16


def mla_rope_and_write(
    q_THR: torch.Tensor,
    rows_TC: torch.Tensor,
    weight_V: torch.Tensor,
    eps: float,
    rotation: Rotation,
    cache_NPC: torch.Tensor,
    slots_T: torch.Tensor,
    out_THR: torch.Tensor,
) -> torch.Tensor:
    """Writes q rotated into out_THR, and each token's normalised latent and rotated key to its slot.

    q_THR, out_THR: fp32, fp16 or bf16, of one dtype, any strides of tokens and heads (parts of wider heads).
    rows_TC: latent numbers, then the key; rows may have any stride. weight_V: of the norm. cache_NPC: last
    dimension contiguous. Returns out_THR. Raises ValueError for unsupported arguments.
    """
    _check(q_THR, rows_TC, weight_V, rotation, cache_NPC, slots_T, out_THR)
    num_tokens, num_heads, rope_dim = q_THR.shape
    groups = triton.cdiv(num_heads, HEADS_TILE)
    launch(
        mla_rope_kernel,
        (num_tokens, groups + 1),
        q_THR,
        rows_TC,
        weight_V,
        rotation.positions_T,
        rotation.cos_sin_PR,
        cache_NPC,
        slots_T,
        out_THR,
        eps,
        num_heads,
        groups,
        *q_THR.stride()[:2],
        *out_THR.stride()[:2],
        rows_TC.stride(0),
        *cache_NPC.stride()[:2],
        BLOCK_SIZE=cache_NPC.shape[1],
        LATENT_DIM=len(weight_V),
        HALF=rope_dim // 2,
        HEADS=HEADS_TILE,
        INTERLEAVED=rotation.interleaved,
        num_warps=4,
    )
    return out_THR


@triton.jit
def load_halves(ptr, rows, mask, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Loads both members of each pair of `rows` (offsets [ROWS, 1]) in fp32, each [ROWS, HALF]."""
    if INTERLEAVED:
        both = tl.load(ptr + rows + tl.arange(0, 2 * HALF)[None, :], mask=mask, other=0.0)
        first, second = tl.split(tl.reshape(both, (rows.shape[0], HALF, 2)))
    else:
        cols = tl.arange(0, HALF)[None, :]
        first = tl.load(ptr + rows + cols, mask=mask, other=0.0)
        second = tl.load(ptr + rows + HALF + cols, mask=mask, other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def store_halves(ptr, first, second, rows, mask, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Stores what `load_halves` loads, rounded to the tensor's dtype."""
    kind: tl.constexpr = ptr.dtype.element_ty
    if INTERLEAVED:
        both = tl.interleave(first, second)
        tl.store(ptr + rows + tl.arange(0, 2 * HALF)[None, :], both.to(kind), mask=mask)
    else:
        cols = tl.arange(0, HALF)[None, :]
        tl.store(ptr + rows + cols, first.to(kind), mask=mask)
        tl.store(ptr + rows + HALF + cols, second.to(kind), mask=mask)


@triton.jit
def mla_rope_kernel(
    q_ptr,
    rows_ptr,
    weight_ptr,
    positions_ptr,
    cos_sin_ptr,
    cache_ptr,
    slots_ptr,
    out_ptr,
    eps,
    num_heads,
    groups,
    stride_qt,
    stride_qh,
    stride_ot,
    stride_oh,
    stride_rt,
    stride_cn,
    stride_cp,
    BLOCK_SIZE: tl.constexpr,
    LATENT_DIM: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotates a group of a token's query heads; the last program of a token writes its row of the cache."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    cols = tl.arange(0, HALF)[None, :]
    at = cos_sin_ptr + tl.load(positions_ptr + token).to(tl.int64) * (2 * HALF)
    cos = tl.load(at + cols)
    sin = tl.load(at + HALF + cols)
    if group < groups:
        heads = group * HEADS + tl.arange(0, HEADS)[:, None]
        mask = heads < num_heads
        a, b = load_halves(q_ptr + token * stride_qt, heads * stride_qh, mask, HALF, INTERLEAVED)
        to = out_ptr + token * stride_ot
        store_halves(to, a * cos - b * sin, b * cos + a * sin, heads * stride_oh, mask, HALF, INTERLEAVED)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            row = rows_ptr + token * stride_rt
            to = cache_ptr + (slot // BLOCK_SIZE) * stride_cn + (slot % BLOCK_SIZE) * stride_cp
            c = tl.arange(0, LATENT_DIM)
            x = tl.load(row + c).to(tl.float32)
            weight = tl.load(weight_ptr + c).to(tl.float32)
            y = x * tl.rsqrt(tl.sum(x * x) / LATENT_DIM + eps) * weight
            tl.store(to + c, y.to(cache_ptr.dtype.element_ty))
            one = tl.zeros([1, 1], tl.int32)
            a, b = load_halves(row + LATENT_DIM, one, one == 0, HALF, INTERLEAVED)
            first, second = a * cos - b * sin, b * cos + a * sin
            store_halves(to + LATENT_DIM, first, second, one, one == 0, HALF, INTERLEAVED)


def mla_rope_and_write_reference(
    q_THR: torch.Tensor,
    rows_TC: torch.Tensor,
    weight_V: torch.Tensor,
    eps: float,
    rotation: Rotation,
    cache_NPC: torch.Tensor,
    slots_T: torch.Tensor,
    out_THR: torch.Tensor,
) -> torch.Tensor:
    """Computes the reference of `mla_rope_and_write` in torch."""
    at = rotation.cos_sin_PR.index_select(0, rotation.positions_T)
    latent_TV, key_TR = rows_TC.split([len(weight_V), q_THR.shape[2]], dim=1)
    latent_TV = F.rms_norm(latent_TV.float(), weight_V.shape, weight_V.float(), eps)
    key_TR = rotated(key_TR[:, None], at, rotation.interleaved)[:, 0]
    written = slots_T >= 0
    rows = torch.cat([latent_TV, key_TR], dim=1).to(cache_NPC.dtype)[written]
    slots = slots_T[written].long()
    cache_NPC[slots // cache_NPC.shape[1], slots % cache_NPC.shape[1]] = rows
    return out_THR.copy_(rotated(q_THR, at, rotation.interleaved))


def _check(
    q_THR: torch.Tensor,
    rows_TC: torch.Tensor,
    weight_V: torch.Tensor,
    rotation: Rotation,
    cache_NPC: torch.Tensor,
    slots_T: torch.Tensor,
    out_THR: torch.Tensor,
) -> None:
    num_tokens, rope_dim, latent_dim = len(q_THR), q_THR.shape[-1], len(weight_V)
    if q_THR.dim() != 3 or q_THR.dtype not in DTYPES or out_THR.shape != q_THR.shape:
        raise ValueError(
            f"q: {q_THR.dtype} {list(q_THR.shape)}, out {list(out_THR.shape)}; must be [tokens, heads, "
            "rope_dim] of one shape, in fp32, fp16 or bf16"
        )
    if latent_dim not in LATENT_DIMS or rope_dim not in ROPE_DIMS:
        raise ValueError(
            f"latent_dim {latent_dim} with rope_dim {rope_dim}: must be one of {LATENT_DIMS} with one of "
            f"{ROPE_DIMS}"
        )
    width = latent_dim + rope_dim
    if rows_TC.shape != (num_tokens, width) or cache_NPC.dim() != 3 or cache_NPC.shape[2] != width:
        raise ValueError(
            f"rows {list(rows_TC.shape)}, cache {list(cache_NPC.shape)}: must be [{num_tokens}, {width}] and "
            f"[num_blocks, block_size, {width}]"
        )
    if any(x.dtype != q_THR.dtype or x.stride(-1) != 1 for x in (q_THR, out_THR, rows_TC, cache_NPC)):
        raise ValueError(f"out, rows and cache: must be {q_THR.dtype} as q, with a contiguous last dimension")
    if rotation.cos_sin_PR.shape[1] != rope_dim or rotation.cos_sin_PR.dtype != torch.float32:
        raise ValueError(f"cos_sin {list(rotation.cos_sin_PR.shape)}: must be fp32 [positions, {rope_dim}]")
    for name, x in (("positions", rotation.positions_T), ("slots", slots_T)):
        if x.shape != (num_tokens,) or x.dtype not in (torch.int32, torch.int64) or not x.is_contiguous():
            raise ValueError(f"{name}: {x.dtype} {list(x.shape)}; must be contiguous integers [{num_tokens}]")


def cases() -> Iterator[Case]:
    """Yields DeepSeek-V3 on a single rank and on one of eight."""
    for num_heads, num_tokens in ((128, 32), (16, 64), (16, 4096)):
        moved = 2.0 * num_tokens * (2 * num_heads * 64 + 2 * 576)
        yield Case(f"deepseek_v3-heads{num_heads}-tokens{num_tokens}", _made(num_heads, num_tokens), moved)


def _made(num_heads: int, num_tokens: int) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        q = made((num_tokens, num_heads, 192), torch.bfloat16, device)
        out = made((num_tokens, num_heads, 576), torch.bfloat16, device)
        rows, weight = (made(shape, torch.bfloat16, device) for shape in ((num_tokens, 576), (512,)))
        cache = made((num_tokens // 64 + 2, 64, 576), torch.bfloat16, device)
        positions = torch.arange(num_tokens, device=device)
        rotation = Rotation(positions, cos_sin_table(64, 4096, device=device), interleaved=True)
        return lambda: mla_rope_and_write(
            q[:, :, 128:], rows, weight, 1e-6, rotation, cache, positions + 64, out[:, :, 512:]
        )

    return make
