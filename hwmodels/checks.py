"""Checks for settings classes. They test for finite numbers, as NaN passes a comparison like `value < 0`."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from numbers import Integral, Real
from typing import Any


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


def check_curve(
    curve: Any, *, capabilities: Iterable[str] = (), zero_allowed: str = "", most_share: float = 1.0
) -> None:
    """Raises ValueError unless the figures of a curve are finite numbers > 0, and its shares at most 1.

    curve: a dataclass. capabilities: those that its compute capability may be. zero_allowed: a field that may
    be 0. most_share: the largest value of a field that is a share.
    """
    for entry in fields(curve):
        name, value = entry.name, getattr(curve, entry.name)
        if name == "compute_capability":
            if value not in capabilities:
                raise ValueError(
                    f"compute_capability={value}: must be one of {', '.join(capabilities)}; "
                    "choose that of the most similar device"
                )
        elif not isinstance(value, bool):
            check_finite(name, value, zero_allowed=name == zero_allowed)
            if "_share" in name and value > most_share:
                raise ValueError(f"{name}={value}: must be a share, > 0 and <= 1")


def is_finite(value: object) -> bool:
    """Tests whether a value is a finite number; a boolean, and a whole number beyond a float's, is not."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def is_whole(value: object) -> bool:
    """Tests whether a value is a whole number; a boolean is not."""
    return isinstance(value, Integral) and not isinstance(value, bool)
