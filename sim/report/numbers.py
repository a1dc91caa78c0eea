"""Formats numbers with units and the same rounding for the terminal and the report."""

from __future__ import annotations

import math
from typing import NamedTuple

from sim.metrics.confidence import Interval

MISSING = "–"


def amount_of_kv(num_tokens: int, num_bytes: float) -> str:
    """Returns an amount of KV in GB, or in tokens if its bytes are unknown."""
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


def count(value: int | None) -> str:
    """Returns a whole number: 1,234."""
    return MISSING if value is None else f"{value:,}"


class Supported(NamedTuple):
    """A metric and the bounds of its interval as text, with the digits supported by the interval."""

    mean: str
    low: str
    high: str
    half_width: str


def decimals_of(half_width: float) -> int:
    """Returns the decimals that an interval of a half width supports; negative: 10, 100, ... is the unit.

    Decimals go down to the first digit of the half width, plus one more if that digit is 1 or 2: 35.2 ± 3.9
    is 35 ± 4, 35.2 ± 1.23 is 35.2 ± 1.2 and 1,234 ± 265 is 1,230 ± 270.
    """
    exponent = math.floor(math.log10(half_width))
    if round(half_width / 10.0**exponent) >= 10:  # 0.96 is 1.0
        exponent += 1
    return -exponent + (round(half_width / 10.0**exponent, 9) < 2.95)


def rounded(value: float, decimals: int) -> str:
    """Returns a number with this many decimals, or rounded to tens, hundreds, ... if negative."""
    shown = round(value, decimals)
    return f"{shown + 0.0:,.{max(decimals, 0)}f}"  # + 0.0: no -0


def supported(interval: Interval, factor: float = 1.0) -> Supported | None:
    """Returns a metric with its interval, times `factor`, consistently rounded; None without an interval.

    Every table and sentence with an interval is rounded here. There are at most the digits of `number`, or
    two of the half width, because the search or the seeds do not support more. If one bound is much further
    away than the other, it is rounded by its own distance, as for a factor of 75 with bounds 0.5 and 11,000.
    """
    if math.isnan(interval.mean) or math.isnan(interval.low) or interval.is_exact:
        return None
    mean, low, high = (factor * value for value in (interval.mean, interval.low, interval.high))
    if factor < 0:
        low, high = high, low
    half_width = max(high - mean, mean - low)
    if not half_width > 0 or math.isinf(half_width):
        return None
    decimals = decimals_of(half_width)
    if low <= 0 or rounded(low, decimals).strip("0.,"):
        mean_, low_, high_, half_ = (rounded(value, decimals) for value in (mean, low, high, half_width))
        return Supported(mean_, low_, high_, half_)
    nearer = of_low = decimals_of(max(mean - low, 0.1 * low))
    while not rounded(low, of_low).strip("0.,"):  # bounds 22 and 400 must not become 0 and 400
        of_low += 1
    return Supported(
        rounded(mean, nearer), rounded(low, of_low), rounded(high, decimals), rounded(half_width, decimals)
    )


def with_interval(interval: Interval, factor: float = 1.0) -> str:
    """Returns mean ± half the interval, both times `factor`: 20.4 ± 0.7; without an interval: 20.4."""
    shown = supported(interval, factor)
    if shown is None:
        return MISSING if math.isnan(interval.mean) else number(factor * interval.mean)
    return f"{shown.mean} ± {shown.half_width}"


def bounds_text(interval: Interval, factor: float = 1.0) -> str:
    """Returns the bounds of an interval times `factor`: 31 to 40; MISSING without one."""
    shown = supported(interval, factor)
    return MISSING if shown is None else f"{shown.low} to {shown.high}"


def half_text(interval: Interval, factor: float = 1.0) -> str:
    """Returns half the width of an interval times `factor`; MISSING without one."""
    shown = supported(interval, factor)
    return MISSING if shown is None else shown.half_width


def mean_text(interval: Interval, factor: float = 1.0) -> str:
    """Returns the mean of an interval times `factor`, with the digits supported by the interval."""
    shown = supported(interval, factor)
    if shown is None:
        return MISSING if math.isnan(interval.mean) else number(factor * interval.mean)
    return shown.mean


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
    """Returns an amount in US dollars: from $1 rounded to cents, below that with three digits."""
    if value_usd is None:
        return MISSING
    return f"${value_usd:,.2f}" if value_usd >= 1 else f"${value_usd:#.3g}"
