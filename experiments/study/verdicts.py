"""How studies write intervals over seeds, ratios and differences; the same in every table and sentence."""

from __future__ import annotations

import math

from experiments.study.figures import Metric, unit_of
from sim.metrics.paired import CONFIDENCE, Interval, Paired
from sim.report.numbers import MISSING, number

LEVEL = f"{100 * CONFIDENCE:g} % interval"


def value_text(value: float, metric: Metric) -> str:
    """A figure in the unit of `titled`."""
    return MISSING if math.isnan(value) else number(unit_of(metric)[0] * value)


def ratio_text(paired: Paired) -> str:
    """x3.12, or in percent where the two are close; nothing where there is no ratio."""
    if paired.ratio is None or math.isnan(paired.ratio.mean):
        return MISSING
    return _factor(paired.ratio.mean, _close(paired.ratio))


def interval_text(ratio: Interval | None) -> str:
    """3.05 to 3.19."""
    if ratio is None or math.isnan(ratio.low):
        return MISSING
    close = _close(ratio)
    return f"{_bound(ratio.low, close)} to {_bound(ratio.high, close)}"


def signed(value: float) -> str:
    """With + or − in front."""
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{number(abs(value))}"


def _close(ratio: Interval) -> bool:
    """Whether a percentage reads better than a factor."""
    return 0.9 < ratio.mean < 1.1


def _factor(ratio: float, close: bool) -> str:
    return f"{signed(100 * (ratio - 1))} %" if close else f"×{number(ratio)}"


def _bound(ratio: float, close: bool) -> str:
    return _factor(ratio, close).removeprefix("×")
