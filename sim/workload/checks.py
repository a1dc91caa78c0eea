"""Checks of workload settings; every error names the key, its value, the rule and the unit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

MAX_TOKENS = 1_000_000_000
"""Limit of one prompt or output: a thousand times the longest contexts; sums still fit in 64 bits."""
MAX_ARRIVAL_S = 1e9
"""Limit of an arrival after the start of a trace, 32 years; Unix times since 2001 are above it."""
MAX_CV = 1000.0
"""Limit of a coefficient of variation; the square of a larger one could overflow."""

_UNITS = (
    ("tokens_per_s", " tokens/s"),
    ("_per_s", " requests/s"),
    ("_s", " s"),
    ("_tokens", " tokens"),
)  # first match wins


def require_positive(settings: object, *names: str) -> None:
    """Raises ValueError for the first named field that is set (not None) and not a finite number > 0."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: must be finite and > 0{_unit(name)}")


def require_not_negative(settings: object, *names: str) -> None:
    """Raises ValueError for the first named field that is set (not None) and not a finite number >= 0."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}: must be finite and >= 0{_unit(name)}")


def require_at_most(settings: object, maximum: float, *names: str) -> None:
    """Raises ValueError for the first named field above `maximum`."""
    for name in names:
        value = getattr(settings, name)
        if value > maximum:
            raise ValueError(f"{name}={value}: must be <= {maximum:g}{_unit(name)}")


class _Sized(Protocol):
    def magnitudes(self) -> Mapping[str, float]: ...


def require_counts(settings: object, maximum: int, unit: str, *names: str) -> None:
    """Raises ValueError for the first named distribution with a magnitude outside [1, maximum].

    A magnitude below 1 is an error because samples are rounded up to 1.
    """
    for name in names:
        distribution: _Sized = getattr(settings, name)
        for key, value in distribution.magnitudes().items():
            if not 1 <= value <= maximum:
                raise ValueError(f"{name}.{key}={value:.15g}: must be >= 1 and <= {maximum:,} {unit}")


def _unit(name: str) -> str:
    return next((unit for suffix, unit in _UNITS if name.endswith(suffix)), "")
