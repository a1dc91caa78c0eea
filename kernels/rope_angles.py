"""Angles of rotary position embeddings, plain or scaled for longer contexts, by a model's `rope_scaling`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def cos_sin_table(
    rotary_dim: int,
    num_positions: int,
    *,
    base: float = 10000.0,
    scaling: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Returns [num_positions, rotary_dim] fp32: cosines of the rotary_dim / 2 angles, then their sines.

    scaling: the `rope_scaling` of a config.json: types default, linear, llama3 (Llama 3.1), yarn (Peng et
    al. 2023) and longrope (Ding et al. 2024), with their attention factor multiplied in. Raises ValueError
    on other types and missing settings.
    """
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"rotary_dim={rotary_dim}: must be even and at least 2")
    frequencies, factor = rope_frequencies(rotary_dim, base, scaling, num_positions)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float64), frequencies)
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * factor).to(device=device, dtype=torch.float32)


def rope_frequencies(
    rotary_dim: int, base: float, scaling: Mapping[str, Any] | None = None, num_positions: int = 0
) -> tuple[torch.Tensor, float]:
    """Returns radians per position [rotary_dim / 2] in fp64, and the factor on cosine and sine.

    Without scaling: base^(-2 i / rotary_dim); for rotary_dim 4 and base 10000: 1 and 0.01. num_positions:
    the largest number of tokens that are served, which decides between the two scalings of longrope.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim
    # Computed in fp32 as in training, because positions amplify differences in the last bits.
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
        if kind == "longrope":
            return _longrope(plain, scaling, num_positions)
        if kind == "yarn":
            return _yarn(plain, rotary_dim, base, scaling)
    except KeyError as error:
        raise ValueError(f"rope_scaling of type {kind!r}: {error} is missing in {dict(scaling)}") from None
    raise ValueError(f"rope_scaling type {kind!r}: must be default, linear, longrope, llama3 or yarn")


def _llama3(plain: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Divides low frequencies by `factor`, keeps high ones, interpolates between (Llama 3.1 model card)."""
    context = scaling["original_max_position_embeddings"]
    turns = context * plain / (2 * math.pi)  # in the original context
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * plain + (1 - kept) * plain / scaling["factor"]


def _longrope(
    plain: torch.Tensor, scaling: Mapping[str, Any], num_positions: int
) -> tuple[torch.Tensor, float]:
    """Divides each frequency by a factor of its own: a long one if contexts may exceed the original one.

    All positions of all requests have the same factors, because cached keys were rotated with them.
    """
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    name = "long_factor" if num_positions > original else "short_factor"
    divisors = torch.tensor(scaling[name], dtype=torch.float64)
    given = scaling.get("attention_factor")
    if given is None:
        given = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return plain / divisors, float(given)


def _yarn(
    plain: torch.Tensor, rotary_dim: int, base: float, scaling: Mapping[str, Any]
) -> tuple[torch.Tensor, float]:
    """Keeps dimensions of more than beta_fast turns, divides those below beta_slow by factor, and blends."""
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
