"""4-bit floating-point weights in blocks of 32 with a shared exponent (MXFP4, OCP Microscaling 1.0, 2023).

A number has a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, times 2^(scale -
127). Of the two numbers of a byte, the first is in the low bits, as gpt-oss stores them.

Letters: N outputs, K inputs; leading dimensions (experts) are kept.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

BLOCK = 32
"""Inputs that share a scale."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Mxfp4Weight(NamedTuple):
    """codes: uint8 [..., N, K / 2]; scales: exponents with offset 127, uint8 [..., N, K / 32]."""

    codes: torch.Tensor
    scales: torch.Tensor


def quantise_mxfp4(weight: torch.Tensor) -> Mxfp4Weight:
    """Rounds a weight [..., N, K] to the nearest numbers, ties to the smaller one.

    A block's exponent is that of its largest magnitude minus 2, so that the largest number is at most 6 after
    saturation. Raises ValueError unless K is a multiple of 32.
    """
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"{weight.shape[-1]} inputs: mxfp4 supports multiples of {BLOCK}")
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    exponents = (largest.log2().floor() - 2).clamp(-127, 127)
    scaled = blocks / exponents.exp2()
    edges = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device=weight.device)
    codes = torch.bucketize(scaled.abs().contiguous(), edges) + 8 * (scaled < 0)
    pairs = codes.flatten(-2).unflatten(-1, (-1, 2)).to(torch.uint8)
    return Mxfp4Weight(pairs[..., 0] | pairs[..., 1] << 4, (exponents[..., 0] + 127).to(torch.uint8))


def dense_mxfp4(weight: Mxfp4Weight, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Returns the numbers of a weight, [..., N, K]."""
    codes = torch.stack([weight.codes & 15, weight.codes >> 4], dim=-1).flatten(-2)
    table = torch.tensor([*VALUES, *(-value for value in VALUES)], device=codes.device)
    scales = (weight.scales.float() - 127).exp2().repeat_interleave(BLOCK, dim=-1)
    return (table[codes.int()] * scales).to(dtype)
