"""GEMM of 8-bit activations by 8-bit weights, FP8 (e4m3) or INT8, with one scale per token and per channel.

`quantise_tokens` scales each token's row so that its largest magnitude is the type's largest number. The GEMM
runs on 8-bit tensor cores, and both scales are applied to its sum. Letters: M rows (tokens), N outputs, K
inputs. The GEMM moves N*K + M*K + 2*M*N bytes and computes 2*M*N*K FLOPs at twice the bf16 rate. Hopper's FP8
tensor cores keep about 14 bits of a running sum, so it is added to an fp32 sum after every `depth` of K.
gfx942 has no native e4m3fn: its kernel converts FP8 to a wider type first, so INT8 is faster there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.case import Case
from kernels.gemm import Tile, check_gemm, for_target, random_tensor, scaled_gemm
from kernels.launch import INTERPRETER, launch, target

FP8 = torch.float8_e4m3fn
LARGEST = {FP8: 448.0, torch.int8: 127.0}
OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Tile by target and by the largest M for which it is used.
TILES = {
    "sm_80": {16: Tile(16, 64, 256, 4, 4), 64: Tile(64, 64, 128, 4, 4), 1 << 30: Tile(128, 128, 128, 8, 3)},
    "sm_90": {16: Tile(16, 64, 256, 4, 4), 64: Tile(64, 64, 128, 4, 5), 1 << 30: Tile(128, 128, 128, 8, 4)},
    "gfx942": {16: Tile(16, 64, 256, 4, 2), 64: Tile(64, 64, 128, 4, 2), 1 << 30: Tile(128, 128, 64, 8, 2)},
    INTERPRETER: {16: Tile(16, 32, 64, 4, 1), 64: Tile(32, 32, 64, 4, 1), 1 << 30: Tile(64, 64, 64, 4, 1)},
}
QUANTISE_TILE = 4096


class ScaledTensor(NamedTuple):
    """8-bit rows and their scales: values FP8 or int8 [R, K], contiguous; scales fp32 [R]."""

    values_RK: torch.Tensor
    scales_R: torch.Tensor


def quantise_tokens(x_MK: torch.Tensor, dtype: torch.dtype) -> ScaledTensor:
    """Quantises each row of x [M, K] (bf16, fp16 or fp32, any row stride) to float8_e4m3fn or int8.

    A row of zeros has the scale 1e-12 / (largest number of the type). Raises ValueError for other dtypes, and
    for FP8 on a chip without it (before sm_89).
    """
    check_dtype(dtype)
    if x_MK.dtype not in OUT_DTYPES or x_MK.dim() != 2 or x_MK.stride(1) != 1:
        raise ValueError(
            f"x is {x_MK.dtype} {list(x_MK.shape)}; must be [M, K] with contiguous rows of one of "
            f"{', '.join(map(str, OUT_DTYPES))}"
        )
    m, k = x_MK.shape
    values_MK = torch.empty(m, k, dtype=dtype, device=x_MK.device)
    scales_M = torch.empty(m, dtype=torch.float32, device=x_MK.device)
    launch(
        quantise_tokens_kernel,
        (m,),
        x_MK,
        values_MK,
        scales_M,
        k,
        x_MK.stride(0),
        LARGEST=LARGEST[dtype],
        TILE=min(QUANTISE_TILE, triton.next_power_of_2(k)),
        num_warps=8,
    )
    return ScaledTensor(values_MK, scales_M)


def quantise_tokens_reference(x_MK: torch.Tensor, dtype: torch.dtype) -> ScaledTensor:
    """Computes the reference of `quantise_tokens` in torch; weights [N, K] are quantised with it on load."""
    x = x_MK.float()
    scales_M = x.abs().amax(dim=1).clamp(min=1e-12) / LARGEST[dtype]
    scaled = (x / scales_M[:, None]).clamp(-LARGEST[dtype], LARGEST[dtype])
    return ScaledTensor((scaled.round() if dtype == torch.int8 else scaled).to(dtype), scales_M)


def w8a8_gemm(
    x: ScaledTensor,
    weight: ScaledTensor,
    bias_N: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Returns x @ weight^T + bias: [M, N] in out_dtype, for x [M, K], weight [N, K], both FP8 or both int8.

    bias_N: [N], any float type. num_splits: parts of K that are summed separately; None: as many as fill the
    chip. Raises ValueError for other dtypes, shapes that do not match, and FP8 on a chip without it.
    """
    (values_MK, scales_M), (weight_NK, scales_N) = x, weight
    check_dtype(weight_NK.dtype)
    check_gemm(values_MK, weight_NK.shape[1], weight_NK.shape[0], bias_N, (weight_NK.dtype,))
    if out_dtype not in OUT_DTYPES:
        raise ValueError(f"out_dtype is {out_dtype}; must be one of {', '.join(map(str, OUT_DTYPES))}")
    for name, scales, length in (("x", scales_M, len(values_MK)), ("weight", scales_N, len(weight_NK))):
        if scales.dtype != torch.float32 or scales.shape != (length,):
            raise ValueError(
                f"scales of {name} are {scales.dtype} {list(scales.shape)}; must be fp32 [{length}]"
            )
    if not weight_NK.is_contiguous():
        raise ValueError("weight must be contiguous")
    return scaled_gemm(
        values_MK, weight_NK, scales_M, scales_N, bias_N, out_dtype, for_target(TILES), num_splits
    )


def w8a8_gemm_reference(
    x: ScaledTensor,
    weight: ScaledTensor,
    bias_N: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Computes the reference of `w8a8_gemm` in torch, in fp32 (int8 products are exact to 24 bits)."""
    out = x.values_RK.float() @ weight.values_RK.float().T * x.scales_R[:, None] * weight.scales_R
    return (out if bias_N is None else out + bias_N.float()).to(out_dtype)


def check_dtype(dtype: torch.dtype) -> None:
    """Raises ValueError unless the target of launches supports this 8-bit type."""
    if dtype not in LARGEST:
        raise ValueError(f"{dtype}: must be one of {', '.join(map(str, LARGEST))}")
    chip = target()
    if dtype == FP8 and chip.startswith("sm_") and int(chip[3:]) < 89:
        raise ValueError(f"{dtype} needs sm_89 or later, this is {chip}; use torch.int8")


def cases() -> Iterator[Case]:
    """Yields Llama-3.1-8B's MLP and attention output in both types, and the quantisation of activations."""
    for dtype in LARGEST:
        kind = "fp8" if dtype == FP8 else "int8"
        for m in (1, 64, 512):
            yield Case(f"quantise_{kind}_m{m}", partial(_quantise_case, m, 4096, dtype), 3 * m * 4096, 0.0)
        for name, n, k in (("8b_gate_up", 28672, 4096), ("8b_o", 4096, 4096)):
            for m in (1, 64, 512):
                moved = n * k + m * k + 2 * m * n + 4 * (m + n)
                yield Case(f"{name}_{kind}_m{m}", partial(_gemm_case, m, n, k, dtype), moved, 2 * m * n * k)


def _quantise_case(m: int, k: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    x_MK = random_tensor((m, k), torch.bfloat16, device)
    return lambda: quantise_tokens(x_MK, dtype)


def _gemm_case(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    x, weight = (
        ScaledTensor(random_tensor((rows, k), dtype, device), random_tensor((rows,), torch.float32, device))
        for rows in (m, n)
    )
    return lambda: w8a8_gemm(x, weight)


@triton.jit
def quantise_tokens_kernel(
    x_ptr, values_ptr, scales_ptr, k, stride_xm, LARGEST: tl.constexpr, TILE: tl.constexpr
):
    """Quantises one token's row to 8 bits by its largest magnitude, and stores the scale."""
    row = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, TILE)
    b_most = tl.zeros([TILE], dtype=tl.float32)
    for start in range(0, k, TILE):
        b_x = tl.load(x_ptr + row * stride_xm + start + o, mask=start + o < k, other=0).to(tl.float32)
        b_most = tl.maximum(b_most, tl.abs(b_x))
    scale = tl.maximum(tl.max(b_most, 0), 1e-12) / LARGEST
    tl.store(scales_ptr + row, scale)
    for start in range(0, k, TILE):
        mask = start + o < k
        b_x = tl.load(x_ptr + row * stride_xm + start + o, mask=mask, other=0).to(tl.float32)
        b_x = tl.minimum(tl.maximum(tl.div_rn(b_x, scale), -LARGEST), LARGEST)
        if values_ptr.dtype.element_ty == tl.int8:
            b_x = (b_x + 12582912.0) - 12582912.0  # 1.5 * 2^23: rounds half to even, as torch does
        tl.store(values_ptr + row * k + start + o, b_x.to(values_ptr.dtype.element_ty), mask=mask)
