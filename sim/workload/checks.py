"""Checks of workload settings, and of single values of traces and of measured results.

Every error names the key, its value, the rule and the unit. A value of a file that no run can have (a length
of 5.5 tokens, a time that is not finite) is never rounded, and never left out in silence.
"""

from __future__ import annotations

import math
import re
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

MAX_UNIX_S = 4_102_444_800.0
"""Unix time of the year 2100: the latest moment in a measured result."""
MAX_SHOWN = 80
"""Characters of a value that a message shows."""
_DECIMALS = re.compile(r"\s*(\d+)\.0*\s*")
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


def shown(found: object, max_chars: int = MAX_SHOWN) -> str:
    """Returns the beginning of a value of a file for a message, with escapes for what cannot be printed."""
    text = str(found)[:max_chars]
    return text if text.isprintable() else repr(text)[1:-1][:max_chars]


def whole_number(found: object) -> int:
    """Returns a whole number that a file has as an integer, as 5.0, or as the text of one of them.

    Exports of tables write whole numbers as 5.0 where a column also has missing values. Raises ValueError.
    """
    if type(found) is int:
        return found
    if type(found) is float and found.is_integer():
        return int(found)
    if type(found) is str:
        decimals = _DECIMALS.fullmatch(found)
        return int(decimals[1] if decimals else found)
    raise ValueError(found)


def tokens_rule(least: int, most: int = MAX_TOKENS) -> str:
    """Returns the rule of a number of tokens, for messages."""
    return f"a whole number of tokens from {least} to {most:,}"


def tokens(found: object, least: int = 1, most: int = MAX_TOKENS) -> int:
    """Returns a number of tokens. Raises ValueError unless it is whole and between the limits."""
    number = whole_number(found)
    if not least <= number <= most:
        raise ValueError(found)
    return number


def is_tokens(found: object, least: int = 1) -> bool:
    """Returns whether a value of JSON is a number of tokens; a text is none."""
    try:
        return type(found) is not str and tokens(found, least) >= least
    except ValueError:
        return False


def field_tokens(where: str, field: str, found: object, least: int = 0) -> int:
    """Returns a number of tokens. where: the row or element. Raises ValueError that names the field."""
    if is_tokens(found, least):
        return whole_number(found)
    raise ValueError(f"{where}: {field}={shown(found)}: must be {tokens_rule(least)}")


def field_seconds(where: str, field: str, found: object, *, least: float = 0.0, unit_s: float = 1.0) -> float:
    """Returns a time in seconds. where: as above; unit_s: the seconds of the field's unit, 1e-3 for ms.

    Raises ValueError that names the field, unless the value is a finite number from `least` (in seconds) to
    the year 2100.
    """
    if type(found) in (int, float):
        assert isinstance(found, int | float)
        # Compared before the product: an integer of JSON may be too large for a float.
        if least / unit_s <= found <= MAX_UNIX_S / unit_s:
            return float(found) * unit_s
    bounds = f"at most {MAX_UNIX_S / unit_s:g}"
    bounds = bounds if least == -math.inf else f"from {least / unit_s:g} to {MAX_UNIX_S / unit_s:g}"
    raise ValueError(f"{where}: {field}={shown(found)}: must be a finite number {bounds}")
