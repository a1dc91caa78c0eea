"""Checks that the workload settings share, so that every refusal names key, value, rule and unit alike."""

from __future__ import annotations

import math

_UNITS = (("_per_s", " requests/s"), ("_s", " s"), ("_tokens", " tokens"))  # first match wins


def require_positive(settings: object, *names: str) -> None:
    """Raise ValueError for the first named field that is set (not None) and not a finite number > 0."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{name}={value}: must be finite and > 0{_unit(name)}")


def require_not_negative(settings: object, *names: str) -> None:
    """Raise ValueError for the first named field that is set (not None) and not a finite number >= 0."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}: must be finite and >= 0{_unit(name)}")


def _unit(name: str) -> str:
    return next((unit for suffix, unit in _UNITS if name.endswith(suffix)), "")
