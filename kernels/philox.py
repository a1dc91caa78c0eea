"""Philox4x32-10 random numbers (Salmon et al., SC 2011) in torch, as the kernels draw them."""

from __future__ import annotations

import torch


def uniform_reference(
    seed: torch.Tensor, request: torch.Tensor, position: torch.Tensor, purpose: int = 0
) -> torch.Tensor:
    """Returns a uniform number in [0, 1) of 24 bits for each (seed, request, position), fp32 [S]."""
    word = (1 << 32) - 1
    counter = (position & word, request & word, (request >> 32) & word, torch.full_like(position, purpose))
    random = philox_reference(counter, (seed & word, (seed >> 32) & word))[0]
    return (random >> 8).float() / (1 << 24)


def philox_reference(
    counter: tuple[torch.Tensor, ...], key: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, ...]:
    """Computes Philox4x32-10: four random words from four counter and two key words, 32 bits in int64."""
    word = (1 << 32) - 1
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high_0, low_0 = _product(c0, 0xD2511F53)
        high_1, low_1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + 0x9E3779B9) & word, (k1 + 0xBB67AE85) & word
    return c0, c1, c2, c3


def _product(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the high and low 32-bit words of x * factor, by halves, as the product may overflow int64."""
    upper = (x >> 16) * factor
    lower = (x & 0xFFFF) * factor
    middle = (upper & 0xFFFFFFFF) + (lower >> 16)
    high = (upper >> 32 << 16) + (middle >> 16)
    return high, ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)
