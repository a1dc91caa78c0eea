"""Checks for settings classes. They test for finite numbers, as NaN passes a comparison like `value < 0`."""

from __future__ import annotations

import math
from numbers import Integral, Real


def check_finite(name: str, value: float, *, unit: str = "", zero_allowed: bool = False) -> None:
    """Raises ValueError unless value is a finite number > 0, or >= 0 if zero_allowed."""
    if is_finite(value) and (value > 0 or (zero_allowed and value == 0)):
        return
    rule = f"must be a finite number {'>=' if zero_allowed else '>'} 0 {unit}".rstrip()
    raise ValueError(f"{name}={value}: {rule}")


def check_whole(name: str, value: int, *, remedy: str = "") -> None:
    """Raises ValueError, its text ending with the remedy, unless value is a whole number >= 1."""
    if not is_whole(value) or value < 1:
        raise ValueError(f"{name}={value}: must be a whole number >= 1{remedy}")


def is_finite(value: object) -> bool:
    """Tests whether a value is a finite number; a boolean is not."""
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def is_whole(value: object) -> bool:
    """Tests whether a value is a whole number; a boolean is not."""
    return isinstance(value, Integral) and not isinstance(value, bool)
