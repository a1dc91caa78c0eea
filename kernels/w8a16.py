"""GEMM of 16-bit activations by int8 weights with one scale per channel: half the bytes of bf16 at decode.

Weights are rounded symmetrically to [-127, 127]. int8 is converted to bf16 or fp16 exactly, so the products
are those of a 16-bit GEMM, and the scale is applied to the fp32 sum. Letters: M rows (tokens), N outputs, K
inputs. The kernel moves N*K + 4*N bytes of weights and 2*M*(K + N) of activations and computes 2*M*N*K FLOPs:
it is memory-bound up to about M = 100.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch

from kernels.case import Case
from kernels.gemm import Tile, check_gemm, for_target, random_tensor, scaled_gemm
from kernels.launch import INTERPRETER

DTYPES = (torch.bfloat16, torch.float16)
# Tile by target and by the largest M for which it is used.
TILES = {
    "sm_80": {16: Tile(16, 64, 128, 4, 4), 64: Tile(64, 64, 64, 4, 4), 1 << 30: Tile(128, 128, 64, 8, 3)},
    "sm_90": {16: Tile(16, 64, 128, 4, 5), 64: Tile(64, 64, 128, 4, 4), 1 << 30: Tile(128, 128, 64, 8, 4)},
    "gfx942": {16: Tile(16, 64, 128, 4, 2), 64: Tile(64, 64, 64, 4, 2), 1 << 30: Tile(128, 128, 64, 8, 2)},
    INTERPRETER: {16: Tile(16, 32, 64, 4, 1), 64: Tile(32, 32, 64, 4, 1), 1 << 30: Tile(64, 64, 64, 4, 1)},
}


class Int8Weight(NamedTuple):
    """Weight of a linear layer: values int8 [N, K], contiguous; scales float32 [N].

    For E experts: values [E, N, K], scales [E, N].
    """

    values_NK: torch.Tensor
    scales_N: torch.Tensor


def quantise_int8(weight_NK: torch.Tensor) -> Int8Weight:
    """Rounds a weight [N, K] to int8; the largest magnitude of each channel (row) becomes 127."""
    weight = weight_NK.float()
    scales_N = weight.abs().amax(dim=1).clamp(min=1e-12) / 127
    values = (weight / scales_N[:, None]).round().clamp(-127, 127).to(torch.int8)
    return Int8Weight(values, scales_N)


def w8a16_gemm(
    x_MK: torch.Tensor,
    weight: Int8Weight,
    bias_N: torch.Tensor | None = None,
    *,
    num_splits: int | None = None,
) -> torch.Tensor:
    """Returns x @ weight^T + bias: [M, N] in x's dtype.

    x_MK: bf16 or fp16 [M, K], any row stride. bias_N: [N], any float type. num_splits: parts of K that are
    summed separately; None: as many as fill the chip. Raises ValueError for other dtypes and shapes that do
    not match.
    """
    values_NK, scales_N = weight
    check_gemm(x_MK, values_NK.shape[1], values_NK.shape[0], bias_N, DTYPES)
    check_channels(weight)
    return scaled_gemm(x_MK, values_NK, None, scales_N, bias_N, x_MK.dtype, for_target(TILES), num_splits)


def w8a16_gemm_reference(
    x_MK: torch.Tensor,
    weight: Int8Weight,
    bias_N: torch.Tensor | None = None,
) -> torch.Tensor:
    """Computes the reference of `w8a16_gemm` in torch, in fp32 throughout; x may also be fp32."""
    out = x_MK.float() @ weight.values_NK.float().T * weight.scales_N
    return (out if bias_N is None else out + bias_N.float()).to(x_MK.dtype)


def check_channels(weight: Int8Weight) -> None:
    """Raises ValueError unless values are int8 [N, K], contiguous, and scales fp32 [N]."""
    values_NK, scales_N = weight
    if values_NK.dtype != torch.int8 or not values_NK.is_contiguous():
        raise ValueError(f"weight is {values_NK.dtype}; must be contiguous int8 [N, K]")
    if scales_N.dtype != torch.float32 or scales_N.shape != values_NK.shape[:1]:
        raise ValueError(
            f"scales are {scales_N.dtype} {list(scales_N.shape)}; "
            f"must be torch.float32 [{values_NK.shape[0]}]"
        )


def cases() -> Iterator[Case]:
    """Yields Llama-3.1-8B's MLP and attention output, and SmolLM2-135M's down projection."""
    for name, n, k in (("8b_gate_up", 28672, 4096), ("8b_o", 4096, 4096), ("smollm2_down", 576, 1536)):
        for m in (1, 16, 64, 512):
            for dtype in DTYPES if (m, n) == (16, 4096) else DTYPES[:1]:
                moved = n * k + 4 * n + 2 * m * (k + n)
                yield Case(
                    f"{name}_m{m}_{dtype}".replace("torch.", ""),
                    partial(_case, m, n, k, dtype),
                    moved,
                    2 * m * n * k,
                )


def _case(m: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    x_MK = random_tensor((m, k), dtype, device)
    weight = Int8Weight(random_tensor((n, k), torch.int8, device), random_tensor((n,), torch.float32, device))
    return lambda: w8a16_gemm(x_MK, weight)
