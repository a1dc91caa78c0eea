"""RMSNorm: plain, after a residual add, or of every query and key head (Zhang and Sennrich, NeurIPS 2019).

y = x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once. There is one program per row (or a few heads of
a token). A row is read once and stays in registers, so the kernels are memory-bound: 2 rows are moved without
a residual, 4 with it. Shapes: T tokens, N hidden size, H heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.case import Case
from kernels.launch import INTERPRETER, launch, target

MAX_HIDDEN = 32768
MAX_HEAD_DIM = 512
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Tiles(NamedTuple):
    """Launch sizes: elements of a row per warp (at most 16 warps), and elements of heads per program."""

    elements_per_warp: int
    head_tile: int


TILES = {
    "sm_80": Tiles(512, 2048),
    "sm_90": Tiles(512, 2048),
    "gfx942": Tiles(1024, 2048),
    INTERPRETER: Tiles(512, 8192),
}


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Returns x [T, N] normalised over N, times weight [N]; written into `out` if given (it may be x).

    Rows may have any stride; fp32, fp16 or bf16. Raises ValueError for other dtypes and shapes.
    """
    _check(x, weight)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    _check(out, weight, of=x)
    _launch_rows(x, None, weight, eps, out, None)
    return out


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns (rms_norm(x + residual), x + residual); the sum is rounded to its dtype before normalisation.

    x and residual: [T, N] of one dtype; out may be x, residual_out may be residual. Raises ValueError like
    rms_norm.
    """
    _check(x, weight)
    _check(residual, weight, of=x)
    out = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
    residual_out = torch.empty_like(out) if residual_out is None else residual_out
    _check(out, weight, of=x)
    _check(residual_out, weight, of=x)
    _launch_rows(x, residual, weight, eps, out, residual_out)
    return out, residual_out


def qk_norm(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalises each head of q [T, H, D] and k [T, Hk, D] over D, in place; returns (q, k).

    Both may be views of one projection's output: tokens may have any stride, a token's heads are contiguous.
    weights: [D]. fp32, fp16 or bf16, D up to 512. Raises ValueError for unsupported arguments.
    """
    _check_heads(q, k, q_weight, k_weight)
    num_tokens, num_q_heads, head_dim = q.shape
    num_k_heads = k.shape[1]
    head_block = triton.next_power_of_2(head_dim)
    most = triton.next_power_of_2(max(num_q_heads, num_k_heads))
    heads = max(1, min(most, _tiles().head_tile // head_block))
    q_groups = triton.cdiv(num_q_heads, heads)
    launch(
        qk_norm_kernel,
        (num_tokens, q_groups + triton.cdiv(num_k_heads, heads)),
        q,
        k,
        q_weight,
        k_weight,
        q.stride(0),
        k.stride(0),
        num_q_heads,
        num_k_heads,
        q_groups,
        eps,
        head_dim,
        HEADS=heads,
        BLOCK_D=head_block,
        num_warps=4,
    )
    return q, k


@triton.jit
def rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    residual_out_ptr,
    stride_x,
    stride_r,
    stride_o,
    stride_ro,
    n,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalises one row, after adding the residual if ADD is set."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < n
    x = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * stride_r + cols, mask=mask, other=0.0).to(tl.float32)
        rounded = x.to(residual_out_ptr.dtype.element_ty)
        tl.store(residual_out_ptr + row * stride_ro + cols, rounded, mask=mask)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=mask, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / n + eps) * weight
    tl.store(out_ptr + row * stride_o + cols, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def normed_heads(
    ptr, weight_ptr, num_heads, first, eps, head_dim, HEADS: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Normalises `HEADS` heads of one token from `first` on, in place."""
    heads = first + tl.arange(0, HEADS)[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    mask = (heads < num_heads) & (dims < head_dim)
    offs = heads * head_dim + dims  # [HEADS, BLOCK_D]
    x = tl.load(ptr + offs, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dims, mask=dims < head_dim, other=0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x, axis=1) / head_dim + eps)[:, None] * weight
    tl.store(ptr + offs, y.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def qk_norm_kernel(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    stride_q,
    stride_k,
    num_q_heads,
    num_k_heads,
    q_groups,
    eps,
    head_dim,
    HEADS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Normalises HEADS heads of one token's queries or keys."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    if group < q_groups:
        at = q_ptr + token * stride_q
        normed_heads(at, q_weight_ptr, num_q_heads, group * HEADS, eps, head_dim, HEADS, BLOCK_D)
    else:
        at = k_ptr + token * stride_k
        first = (group - q_groups) * HEADS
        normed_heads(at, k_weight_ptr, num_k_heads, first, eps, head_dim, HEADS, BLOCK_D)


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Computes the reference of `rms_norm` in torch."""
    return _into(out, F.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype))


def add_rms_norm_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the reference of `add_rms_norm` in torch."""
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm_reference(total, weight, eps, out=out), _into(residual_out, total)


def qk_norm_reference(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes the reference of `qk_norm` in torch, also in place."""
    return rms_norm_reference(q, q_weight, eps, out=q), rms_norm_reference(k, k_weight, eps, out=k)


def cases() -> Iterator[Case]:
    """Yields decode and prefill rows of SmolLM2-135M, Qwen3-0.6B, Llama-3.1-8B and a 14336-wide row."""
    for num_tokens, hidden in ((1, 576), (64, 1024), (1, 4096), (64, 4096), (4096, 4096), (16, 14336)):
        for add in (False, True):
            rows = 4 if add else 2
            moved = 2.0 * rows * num_tokens * hidden
            name = f"{'add_' if add else ''}rms_norm-{num_tokens}x{hidden}"
            yield Case(name, _rows_case(num_tokens, hidden, add), moved)
    for num_tokens, q_heads, k_heads in ((1, 16, 8), (64, 32, 8), (2048, 32, 8)):
        moved = 4.0 * num_tokens * (q_heads + k_heads) * 128
        yield Case(
            f"qk_norm-{num_tokens}x{q_heads}+{k_heads}", _heads_case(num_tokens, q_heads, k_heads), moved
        )


def _launch_rows(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    out: torch.Tensor,
    residual_out: torch.Tensor | None,
) -> None:
    block = triton.next_power_of_2(x.shape[1])
    launch(
        rms_norm_kernel,
        (x.shape[0],),
        x,
        residual,
        weight,
        out,
        residual_out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        out.stride(0),
        0 if residual_out is None else residual_out.stride(0),
        x.shape[1],
        eps,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // _tiles().elements_per_warp)),
    )


def _tiles() -> Tiles:
    return TILES.get(target(), TILES["sm_90"])


def _check(x: torch.Tensor, weight: torch.Tensor, of: torch.Tensor | None = None) -> None:
    if x.dim() != 2 or x.dtype not in DTYPES or (x.shape[0] and x.stride(1) != 1):
        raise ValueError(
            f"rms_norm: {x.dtype} {list(x.shape)}; must be [tokens, hidden] with contiguous rows of "
            "fp32, fp16 or bf16"
        )
    if not 0 < x.shape[1] <= MAX_HIDDEN:
        raise ValueError(f"rms_norm: hidden size {x.shape[1]}; must be 1 to {MAX_HIDDEN}")
    if weight.shape != x.shape[1:] or not weight.is_contiguous():
        raise ValueError(f"rms_norm: weight {list(weight.shape)}; must be contiguous [{x.shape[1]}]")
    if of is not None and (x.shape != of.shape or x.dtype != of.dtype):
        raise ValueError(
            f"rms_norm: {x.dtype} {list(x.shape)} and {of.dtype} {list(of.shape)}; must have the same dtype "
            "and shape"
        )


def _check_heads(q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor) -> None:
    for x, weight in ((q, q_weight), (k, k_weight)):
        if x.dim() != 3 or x.dtype not in DTYPES or x.dtype != q.dtype or x.shape[0] != q.shape[0]:
            raise ValueError(
                f"qk_norm: {x.dtype} {list(x.shape)} and {q.dtype} {list(q.shape)}; must be [tokens, heads, "
                "head_dim] of the same dtype, fp32, fp16 or bf16"
            )
        head_dim = x.shape[2]
        if head_dim != q.shape[2] or not 0 < head_dim <= MAX_HEAD_DIM:
            raise ValueError(
                f"qk_norm: head_dim {head_dim}; must be 1 to {MAX_HEAD_DIM}, the same for q and k"
            )
        if x.shape[0] and (x.stride(2) != 1 or x.stride(1) != head_dim):
            raise ValueError(f"qk_norm: strides {x.stride()}; the heads of a token must be contiguous")
        if weight.shape != (head_dim,) or not weight.is_contiguous():
            raise ValueError(f"qk_norm: weight {list(weight.shape)}; must be contiguous [{head_dim}]")


def _into(out: torch.Tensor | None, value: torch.Tensor) -> torch.Tensor:
    return value if out is None else out.copy_(value)


def _rows_case(num_tokens: int, hidden: int, add: bool) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        x = torch.randn(num_tokens, hidden, device=device, dtype=torch.bfloat16)
        weight = torch.ones(hidden, device=device, dtype=torch.bfloat16)
        out, residual = torch.empty_like(x), torch.randn_like(x)
        if add:
            return lambda: add_rms_norm(x, residual, weight, 1e-5, out=out, residual_out=residual)
        return lambda: rms_norm(x, weight, 1e-5, out=out)

    return make


def _heads_case(
    num_tokens: int, q_heads: int, k_heads: int
) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        both = torch.randn(num_tokens, q_heads + 2 * k_heads, 128, device=device, dtype=torch.bfloat16)
        q, k, _ = both.split([q_heads, k_heads, k_heads], dim=1)
        weight = torch.ones(128, device=device, dtype=torch.bfloat16)
        return lambda: qk_norm(q, k, weight, weight, 1e-6)

    return make
