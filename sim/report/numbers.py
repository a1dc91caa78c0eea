"""Formats numbers with units and the same rounding for the terminal and the report."""

from __future__ import annotations

import math

from sim.metrics.paired import Interval

MISSING = "–"


def amount_of_kv(num_tokens: int, num_bytes: float) -> str:
    """Returns an amount of KV in GB, or in tokens if its bytes are not known."""
    return f"{number(num_bytes / 1e9)} GB" if num_bytes else f"{num_tokens:,} tokens"


def milliseconds(value_s: float | None) -> str:
    """Returns seconds as milliseconds with three digits: 0.0123 -> 12.3, 3.2 -> 3,200."""
    return MISSING if value_s is None else number(value_s * 1e3)


def seconds(value_s: float) -> str:
    """Returns a duration in seconds, minutes or hours: 42.0 s, 58.3 min, 26.1 h."""
    if value_s < 120:
        return f"{value_s:.1f} s"
    return f"{value_s / 60:.1f} min" if value_s < 7200 else f"{value_s / 3600:.1f} h"


def number(value: float | None) -> str:
    """Returns a number with three digits, from 100 on without decimals: 0.0123, 1.23, 12.3, 1,234."""
    if value is None:
        return MISSING
    return f"{value:,.0f}" if value == 0 or abs(value) >= 99.95 else f"{value:#.3g}"


def with_interval(interval: Interval, factor: float = 1.0) -> str:
    """Returns mean ± half the interval, both times `factor`: 20.4 ± 0.65; without an interval: 20.4."""
    if math.isnan(interval.mean):
        return MISSING
    mean = number(factor * interval.mean)
    if math.isnan(interval.high):
        return mean
    half_width = 0.0 if interval.is_exact else factor * (interval.high - interval.mean)
    return f"{mean} ± {f'{half_width:.2g}' if half_width < 99.5 else f'{half_width:,.0f}'}"


def grams(value_g: float) -> str:
    """Returns a mass with three digits, in kilograms from 1,000 g on."""
    return f"{number(value_g / 1000)} kg" if value_g >= 1000 else f"{number(value_g)} g"


def percent(share: float | None) -> str:
    """Returns a share (0 to 1) as a percentage with one decimal."""
    return MISSING if share is None else f"{100 * share:.1f} %"


def percent_at_least(share: float | None) -> str:
    """Returns a share as a percentage, rounded down: 0.8999 misses a target of 90 % and becomes 89.9 %."""
    # The tolerance is for shares such as 0.57: 1000 * 0.57 is just below 570.
    return MISSING if share is None else f"{math.floor(1000 * share + 1e-9) / 10:.1f} %"


def dollars(value_usd: float | None) -> str:
    """Returns an amount in US dollars, from $1 on to the cent, below with three digits."""
    if value_usd is None:
        return MISSING
    return f"${value_usd:,.2f}" if value_usd >= 1 else f"${value_usd:#.3g}"
