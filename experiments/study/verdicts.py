"""Formats intervals over seeds, ratios and differences, for the tables and sentences of all studies."""

from __future__ import annotations

import math

from experiments.study.figures import Metric, unit_of
from sim.metrics.paired import CONFIDENCE, Interval, Paired
from sim.report.numbers import MISSING, number

LEVEL = f"{100 * CONFIDENCE:g} % interval"


def value_text(value: float, metric: Metric) -> str:
    """Formats a figure in the unit of `titled`."""
    return MISSING if math.isnan(value) else number(unit_of(metric)[0] * value)


def ratio_text(paired: Paired) -> str:
    """Formats a ratio as ×3.12, or in percent if it is close to 1; MISSING if there is none."""
    if paired.ratio is None or math.isnan(paired.ratio.mean):
        return MISSING
    return _factor(paired.ratio.mean, _close(paired.ratio))


def interval_text(ratio: Interval | None) -> str:
    """Formats an interval: 3.05 to 3.19."""
    if ratio is None or math.isnan(ratio.low):
        return MISSING
    close = _close(ratio)
    return f"{_bound(ratio.low, close)} to {_bound(ratio.high, close)}"


def signed(value: float) -> str:
    """Formats a number with + or − in front."""
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{number(abs(value))}"


def _close(ratio: Interval) -> bool:
    """Returns whether a percentage reads better than a factor."""
    return 0.9 < ratio.mean < 1.1


def _factor(ratio: float, close: bool) -> str:
    return f"{signed(100 * (ratio - 1))} %" if close else f"×{number(ratio)}"


def _bound(ratio: float, close: bool) -> str:
    return _factor(ratio, close).removeprefix("×")
