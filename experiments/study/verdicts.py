"""Formats intervals over seeds, ratios and differences, for the tables and sentences of all studies."""

from __future__ import annotations

import math

from experiments.study.figures import Metric, unit_of
from sim.metrics.confidence import CONFIDENCE, Interval, Paired
from sim.report.numbers import MISSING, Supported, number, supported

LEVEL = f"{100 * CONFIDENCE:g} % interval"


def value_text(value: float, metric: Metric) -> str:
    """Formats a figure in the unit of `titled`."""
    return MISSING if math.isnan(value) else number(unit_of(metric)[0] * value)


def ratio_text(paired: Paired) -> str:
    """Formats a ratio as ×3.12, or in percent if it is close to 1; MISSING if there is none.

    It has the digits that its interval supports; without one, a percentage has one decimal.
    """
    ratio = paired.ratio
    if ratio is None or math.isnan(ratio.mean):
        return MISSING
    shown = _supported(ratio)
    if not _close(ratio):
        return f"×{number(ratio.mean) if shown is None else shown.mean}"
    percent = 100 * (ratio.mean - 1)
    if shown is not None:
        return f"{with_sign(shown.mean)} %"
    return f"{with_sign(f'{percent:.1f}')} %" if abs(percent) >= 0.05 else "within 0.05 %"


def interval_text(ratio: Interval | None) -> str:
    """Formats an interval with the digits that it supports: 3.05 to 3.19."""
    shown = None if ratio is None or math.isnan(ratio.mean) else _supported(ratio)
    if ratio is None or shown is None:
        return MISSING
    if not _close(ratio):
        return f"{shown.low} to {shown.high}"
    return f"{with_sign(shown.low)} % to {with_sign(shown.high)} %"


def _supported(ratio: Interval) -> Supported | None:
    """Returns the texts of a ratio, or of its difference from 1 in percent if it is close to 1."""
    if ratio.is_exact:  # before 1 is subtracted, which leaves rounding errors
        return None
    return supported(minus(ratio, 1.0), 100.0) if _close(ratio) else supported(ratio)


def minus(interval: Interval, value: float) -> Interval:
    """Returns an interval shifted by -value."""
    return Interval(interval.mean - value, interval.low - value, interval.high - value, interval.num_values)


def with_sign(text: str) -> str:
    """Formats a rounded number with + or − in front; 0 has none."""
    if not text.strip("-0.,"):
        return text.removeprefix("-")
    return f"−{text[1:]}" if text.startswith("-") else f"+{text}"


def signed(value: float) -> str:
    """Formats a number with + or − in front."""
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{number(abs(value))}"


def _close(ratio: Interval) -> bool:
    """Returns whether a percentage reads better than a factor."""
    return 0.9 < ratio.mean < 1.1
