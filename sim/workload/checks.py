"""Checks of workload settings: every error names the key, its value, the rule and the unit."""

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

MAX_REQUESTS = 1_000_000_000
"""Limit of the requests of a run: a billion take a day to simulate and a hundred GB to write."""
MAX_SESSIONS = 100_000_000
"""Limit of the sessions of a run, which have several requests each."""
MAX_USERS = 10_000_000
"""Limit of the users of a closed loop, each of which is kept in memory for the whole run."""
LIMITS: Mapping[str, tuple[float, str]] = {
    **dict.fromkeys(
        ("num_requests", "max_requests"),
        (MAX_REQUESTS, "more would be simulated for days; to raise the rate, set load"),
    ),
    **dict.fromkeys(
        ("num_conversations", "num_tasks", "max_sessions"),
        (MAX_SESSIONS, "more would be simulated for days; to raise the rate, set load"),
    ),
    "num_users": (MAX_USERS, "each user is kept in memory for the whole run"),
    "duration_s": (MAX_ARRIVAL_S, "which is 32 years"),
}
"""Name of a setting -> its largest value and the reason, in words."""

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
        if value is not None and name in LIMITS:
            most, reason = LIMITS[name]
            if value > most:
                raise ValueError(f"{name}={value:.6g}: must be <= {most:,.0f}{_unit(name)}; {reason}")


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
