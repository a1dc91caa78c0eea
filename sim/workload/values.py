"""Checks single values of traces and of measured results; every reader of such files uses these rules.

A value that no run can have (a length of 5.5 tokens, a time that is not finite) is never rounded, and never
left out in silence.
"""

from __future__ import annotations

import math
import re

from sim.workload.checks import MAX_TOKENS
from sim.workload.trace_files import shown

MAX_UNIX_S = 4_102_444_800.0
"""Unix time of the year 2100: the latest moment in a measured result."""
_DECIMALS = re.compile(r"\s*(\d+)\.0*\s*")


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
