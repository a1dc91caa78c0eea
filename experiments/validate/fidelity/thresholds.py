"""Thresholds of errors, by metric."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from experiments.validate.fidelity.metrics import Metric


@dataclass(frozen=True, kw_only=True, slots=True)
class Thresholds:
    """Largest allowed relative errors, 0.03 for 3 %; None: no verdict on that metric."""

    name: str = ""
    ttft_mean: float | None = None
    tpot_mean: float | None = None
    itl_mean: float | None = None
    e2e_mean: float | None = None
    p50: float | None = None
    """Medians of TTFT, TPOT, ITL and E2E."""
    p90: float | None = None
    p99: float | None = None
    throughput: float | None = None
    """Requests/s and output tokens/s."""
    goodput: float | None = None
    kv_use: float | None = None
    """Mean KV use over time."""
    iteration: float | None = None
    """Median absolute error of an iteration's duration."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name != "name" and value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{field.name}={value}: must be > 0, such as 0.03 for 3 %; null for none")

    @property
    def is_empty(self) -> bool:
        """True if no metric has a threshold."""
        return all(getattr(self, field.name) is None for field in fields(self) if field.name != "name")

    def limit(self, metric: Metric) -> float | None:
        """Returns a metric's threshold; None if it has none."""
        statistic = f"{metric.family}_{metric.statistic}" if metric.statistic == "mean" else metric.statistic
        names = (statistic, metric.family)
        return next((getattr(self, name) for name in names if hasattr(self, name)), None)
