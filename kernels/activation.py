"""Gated activation of an MLP: act(gate) * up, both from one projection (SwiGLU, GEGLU: Shazeer 2020).

x is [gate | up] side by side, as one merged GEMM writes them. The kernel is elementwise and memory-bound (3
elements are moved per result). Shapes: T tokens, N intermediate size.
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

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Tiles(NamedTuple):
    """Elements of a row that one program computes, and its number of warps."""

    block: int
    num_warps: int


TILES = {
    "sm_80": Tiles(1024, 4),
    "sm_90": Tiles(1024, 4),
    "gfx942": Tiles(2048, 4),
    INTERPRETER: Tiles(4096, 4),
}


def silu_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Returns silu(x[:, :N]) * x[:, N:] for x [T, 2 N] as a new [T, N], or writes it into `out`.

    x: fp32, fp16 or bf16; the result is computed in fp32 and rounded once. Rows may have any stride. Raises
    ValueError on other dtypes and shapes.
    """
    return _gated(x, out, gelu=False)


def gelu_tanh_mul(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes `silu_mul` with GELU in its tanh form (Hendrycks and Gimpel 2016) for the gate."""
    return _gated(x, out, gelu=True)


@triton.jit
def gated_kernel(x_ptr, out_ptr, stride_x, stride_o, n, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Computes act(gate) * up of one row and BLOCK columns: grid (rows, column blocks)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < n
    gate = tl.load(x_ptr + row * stride_x + cols, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * stride_x + n + cols, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        # 0.5 (1 + tanh z) = sigmoid(2 z), z = sqrt(2 / pi) (x + 0.044715 x^3)
        act = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        act = gate * tl.sigmoid(gate)
    tl.store(out_ptr + row * stride_o + cols, (act * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul_reference(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the reference of `silu_mul` in torch."""
    gate, up = x.float().chunk(2, dim=-1)
    value = F.silu(gate).mul_(up).to(x.dtype)
    return value if out is None else out.copy_(value)


def gelu_tanh_mul_reference(x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Computes the reference of `gelu_tanh_mul` in torch."""
    gate, up = x.float().chunk(2, dim=-1)
    value = F.gelu(gate, approximate="tanh").mul_(up).to(x.dtype)
    return value if out is None else out.copy_(value)


def cases() -> Iterator[Case]:
    """Yields decode and prefill rows of SmolLM2-135M, Qwen3-0.6B and Llama-3.1-8B."""
    for num_tokens, size in ((1, 1536), (64, 3072), (1, 14336), (64, 14336), (2048, 14336)):
        moved = 6.0 * num_tokens * size
        yield Case(f"silu_mul-{num_tokens}x{size}", _case(silu_mul, num_tokens, size), moved)
    yield Case("gelu_tanh_mul-64x14336", _case(gelu_tanh_mul, 64, 14336), 6.0 * 64 * 14336)


def _gated(x: torch.Tensor, out: torch.Tensor | None, gelu: bool) -> torch.Tensor:
    if x.dim() != 2 or x.dtype not in DTYPES or x.shape[1] % 2 or not x.shape[1]:
        raise ValueError(
            f"silu_mul, gelu_tanh_mul: {x.dtype} {list(x.shape)}; must be [tokens, 2 * size] of fp32, fp16 "
            "or bf16"
        )
    num_tokens, size = x.shape[0], x.shape[1] // 2
    out = x.new_empty(num_tokens, size) if out is None else out
    if out.shape != (num_tokens, size) or out.dtype != x.dtype:
        raise ValueError(f"out: {out.dtype} {list(out.shape)}; must be {x.dtype} {[num_tokens, size]}")
    if num_tokens and (x.stride(1) != 1 or out.stride(1) != 1):
        raise ValueError("silu_mul, gelu_tanh_mul: rows must be contiguous")
    tiles = TILES.get(target(), TILES["sm_90"])
    grid = (num_tokens, triton.cdiv(size, tiles.block))
    launch(
        gated_kernel,
        grid,
        x,
        out,
        x.stride(0),
        out.stride(0),
        size,
        GELU=gelu,
        BLOCK=tiles.block,
        num_warps=tiles.num_warps,
    )
    return out


def _case(
    gate: Callable[..., torch.Tensor], num_tokens: int, size: int
) -> Callable[[torch.device], Callable[[], object]]:
    def make(device: torch.device) -> Callable[[], object]:
        x = torch.empty(num_tokens, 2 * size, device=device, dtype=torch.bfloat16).normal_()
        out = torch.empty(num_tokens, size, device=device, dtype=torch.bfloat16)
        return lambda: gate(x, out=out)

    return make
