"""Random weights of the right shapes, for timing without a download. Equal seeds give equal weights.

They are drawn on the device. Each tensor has its own stream, (seed, name), and a tensor-parallel rank draws
the whole tensor and keeps its share, so the ranks together hold exactly the weights of a single device.
"""

from __future__ import annotations

import hashlib

import torch

from realengine.weights.weight import Weight

STANDARD_DEVIATION = 0.02


def random_weight(
    weight: Weight, share: Weight, dtype: torch.dtype, device: torch.device, *, seed: int = 0
) -> torch.Tensor:
    """Returns a rank's share of one weight: normal with standard deviation 0.02; norms are ones."""
    drawn = _drawn(weight, seed, dtype, device)
    return drawn if share is weight else _share_of(drawn, weight, share)


def _drawn(weight: Weight, seed: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if weight.name.endswith("norm.weight"):
        return torch.ones(weight.shape, dtype=dtype, device=device)
    stream = hashlib.blake2b(f"{seed}/{weight.name}".encode(), digest_size=8).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(stream, "little") >> 1)
    drawn = torch.empty(weight.shape, dtype=dtype, device=device)
    return drawn.normal_(std=STANDARD_DEVIATION, generator=generator)


def _share_of(drawn: torch.Tensor, weight: Weight, share: Weight) -> torch.Tensor:
    own = torch.empty(share.shape, dtype=drawn.dtype, device=drawn.device)
    for before, after in zip(weight.parts, share.parts, strict=True):
        take = (
            slice(a.start - b.start, a.stop - b.start) for a, b in zip(after.take, before.take, strict=True)
        )
        own[after.into] = drawn[before.into][tuple(take)]
    return own
