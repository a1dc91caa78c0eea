"""Computes the errors of a simulated run against real ones: error, noise floor and verdict of each figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from experiments.validate.fidelity.curves import Curve, curves
from experiments.validate.fidelity.iteration_errors import IterationError, iteration_errors
from experiments.validate.fidelity.measured import Measured, of_records
from experiments.validate.fidelity.metrics import Metric, ScaledSlo, metric_values
from experiments.validate.fidelity.thresholds import Thresholds
from hwmodels.iterations import IterationModel
from sim.metrics.definitions import plain_json
from sim.metrics.dialects import MetricsSettings
from sim.metrics.result import RunResult

Verdict = Literal["met", "noise", "missed", ""]
"""met: within the threshold; noise: outside, but no more than real runs differ; empty: no threshold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricError:
    """Error of one figure.

    error: simulated / real - 1. noise: spread of the real runs, (max - min) / mean. real: mean of the real
    runs. NaN: the figure does not exist; for error, also if only real is 0.
    """

    metric: Metric
    simulated: float
    real: float
    error: float
    noise: float
    threshold: float | None

    @property
    def verdict(self) -> Verdict:
        if self.threshold is None or math.isnan(self.error):
            return ""
        if abs(self.error) <= self.threshold:
            return "met"
        return "noise" if abs(self.error) <= self.noise else "missed"

    def to_json(self) -> dict[str, Any]:
        figures = ("simulated", "real", "error", "noise", "threshold")
        return {
            **{key: value for key, value in asdict(self.metric).items() if key in ("name", "label", "unit")},
            **{name: plain_json(getattr(self, name)) for name in figures},
            "verdict": self.verdict,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of the total error. errors: relative and signed, by metric."""

    name: str
    errors: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fidelity:
    """Comparison of one simulated run with one or more real runs of the same workload.

    refusal: why there is no verdict although thresholds were given; empty if there is one.
    """

    simulated: Measured
    reals: tuple[Measured, ...]
    thresholds: Thresholds
    metrics: tuple[MetricError, ...]
    curves: tuple[Curve, ...]
    iterations: tuple[IterationError, ...]
    refusal: str = ""

    @property
    def verdict(self) -> Verdict:
        """Worst verdict of all figures."""
        found = {one.verdict for one in self.metrics}
        return next((verdict for verdict in ("missed", "noise", "met") if verdict in found), "")


def compare(
    simulated: Measured,
    reals: Sequence[Measured],
    *,
    thresholds: Thresholds,
    slos: Sequence[ScaledSlo] = (),
    model: IterationModel | None = None,
) -> Fidelity:
    """Computes all errors. model: prices measured iterations; None: iterations are not compared.

    Raises ValueError without a real run.
    """
    if not reals:
        raise ValueError("there is no real run to compare with")
    own = metric_values(simulated, slos)
    of_reals = [metric_values(run, slos) for run in reals]
    errors = [
        metric_error(metric, value, [values[metric] for values in of_reals], thresholds)
        for metric, value in own.items()
    ]
    found = tuple(curves(simulated, reals))
    errors += [_curve_error(curve, thresholds) for curve in found]
    by_shape = () if model is None else tuple(iteration_errors(reals, model))
    errors += [_iteration_error(one, thresholds) for one in by_shape[:1]]
    return Fidelity(
        simulated=simulated,
        reals=tuple(reals),
        thresholds=thresholds,
        metrics=tuple(errors),
        curves=found,
        iterations=by_shape,
    )


def fidelity_of(
    result: RunResult,
    reals: Sequence[Measured],
    *,
    trim: MetricsSettings,
    thresholds: Thresholds,
    slos: Sequence[ScaledSlo],
    refusal: str = "",
) -> Fidelity:
    """Compares a simulated run with the measured ones, without warm-up and cool-down.

    refusal: why no error may be compared with its threshold; empty if all may.
    """
    refusal = "" if thresholds.is_empty else refusal
    if refusal:
        thresholds = Thresholds(name=thresholds.name)
    simulated, *measured = (
        run.trimmed(warmup_s=trim.known_warmup_s, cooldown_s=trim.cooldown_s)
        for run in (of_records(result.records), *reals)
    )
    found = compare(simulated, measured, thresholds=thresholds, slos=slos, model=result.models[0])
    return replace(found, refusal=refusal)


def metric_error(
    metric: Metric, simulated: float, reals: Sequence[float], thresholds: Thresholds
) -> MetricError:
    """Computes a metric's error: simulated 1.1, real 0.9 and 1.1 give error +10 %, noise 20 %."""
    real = sum(reals) / len(reals)
    spread = max(reals) - min(reals) if len(reals) > 1 else math.nan
    return MetricError(
        metric=metric,
        simulated=simulated,
        real=real,
        error=_relative(simulated - real, real),
        noise=_relative(spread, real),
        threshold=thresholds.limit(metric),
    )


def _curve_error(curve: Curve, thresholds: Thresholds) -> MetricError:
    """Computes the error of the mean over time; the distance of the curves is reported separately."""
    metric = Metric(
        name=f"{curve.name}_mean",
        label=f"{curve.title}, mean",
        family="kv_use" if curve.name == "kv_use_share" else curve.name,
        statistic="mean",
        unit="share" if curve.name == "kv_use_share" else "requests",
    )
    return metric_error(
        metric, curve.simulated_mean, [float(values.mean()) for values in curve.reals], thresholds
    )


def _iteration_error(found: IterationError, thresholds: Thresholds) -> MetricError:
    """Converts the error of all iterations to a metric's error: the median absolute error."""
    metric = Metric(
        name="iteration_median",
        label="iteration, median abs.",
        family="iteration",
        statistic="median",
        unit="s",
    )
    return MetricError(
        metric=metric,
        simulated=math.nan,
        real=found.measured_s,
        error=found.median_absolute,
        noise=found.noise,
        threshold=thresholds.limit(metric),
    )


def _relative(difference: float, real: float) -> float:
    """Returns the difference relative to the real value; 0 if both are 0, NaN if only the real value is."""
    if real:
        return difference / real
    return 0.0 if difference == 0 else math.nan
