"""Tables and sentences of the errors, for terminal and report; the first row is the heading."""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.validate.fidelity.curves import Curve
from experiments.validate.fidelity.errors import Fidelity, MetricError, Part
from experiments.validate.fidelity.iteration_errors import IterationError
from sim.report import numbers
from sim.report.wording import plural

VERDICTS = {
    "met": "within",
    "noise": "within noise",
    "missed": "outside",
    "": numbers.MISSING,
}


def verdict_line(fidelity: Fidelity) -> str:
    """Returns one sentence on all thresholds."""
    if fidelity.refusal:
        return f"There is no verdict on the figures, because {fidelity.refusal}."
    judged = [one for one in fidelity.metrics if one.verdict]
    if not judged:
        return "There is no verdict, because the measured figures have no thresholds."
    met = sum(one.verdict == "met" for one in judged)
    name = f"thresholds ({fidelity.thresholds.name})" if fidelity.thresholds.name else "thresholds"
    text = f"{met} of {plural(len(judged), 'figure')} {'is' if met == 1 else 'are'} within the {name}"
    for verdict, words in (("noise", "within the noise of the measured runs"), ("missed", "outside")):
        if found := [one.metric.label for one in judged if one.verdict == verdict]:
            text += f"; {words}: {', '.join(found)}"
    return f"{text}."


def metric_rows(fidelity: Fidelity) -> list[list[str]]:
    """Returns one row per figure, without those that neither run has."""
    return [
        ["", "simulated", "measured", "error", "noise floor", "allowed", "verdict"],
        *(_metric_row(one) for one in fidelity.metrics if not _is_empty(one)),
    ]


def _is_empty(one: MetricError) -> bool:
    return math.isnan(one.error) and math.isnan(one.real)


def _metric_row(one: MetricError) -> list[str]:
    return [
        one.metric.label,
        valued(one.simulated, one.metric.unit),
        valued(one.real, one.metric.unit),
        signed_percent(one.error) if one.metric.family != "iteration" else plain_percent(one.error),
        plain_percent(one.noise),
        plain_percent(one.threshold),
        VERDICTS[one.verdict],
    ]


def curve_rows(curves: Sequence[Curve]) -> list[list[str]]:
    """Returns the mean absolute difference of each pair of curves."""
    rows = [["over time", "simulated", "measured", "difference", "of the mean", "noise floor", "read from"]]
    for curve in curves:
        unit = "share" if curve.name == "kv_use_share" else "requests"
        mean = curve.real_mean or math.nan
        rows.append(
            [
                curve.title,
                valued(curve.simulated_mean, unit),
                valued(curve.real_mean, unit),
                valued(curve.difference, unit),
                plain_percent(curve.difference / mean),
                plain_percent(curve.noise / mean),
                {"iterations": "iterations", "log": "server's log", "requests": "timestamps"}[curve.source],
            ]
        )
    return rows


FIGURES = ("count", "measured", "median error", "p10", "p90", "median abs.", "of the sum")
"""Headings of the figures of a kind of iterations."""


def iteration_rows(found: Sequence[IterationError]) -> list[list[str]]:
    """Returns the errors of the model's durations, by kind and bucket."""
    return [
        ["iterations", "batch", "context per sequence", *FIGURES, "noise floor"],
        *([one.kind, one.batch or "all", one.context or "all", *_iteration_figures(one)] for one in found),
    ]


def kind_rows(found: Sequence[IterationError]) -> list[list[str]]:
    """Returns the errors of whole kinds of iterations only."""
    return [
        ["iterations", *FIGURES, "noise"],
        *([one.kind, *_iteration_figures(one)] for one in found if not (one.batch or one.context)),
    ]


def _iteration_figures(one: IterationError) -> list[str]:
    return [
        f"{one.count:,}",
        f"{numbers.milliseconds(one.measured_s)} ms",
        *map(signed_percent, (one.median, one.p10, one.p90)),
        plain_percent(one.median_absolute),
        signed_percent(one.total),
        plain_percent(one.noise),
    ]


def part_rows(parts: Sequence[Part]) -> list[list[str]]:
    """Returns the decomposition: one row per part, one column per metric."""
    metrics = list(parts[0].errors) if parts else []
    rows = [[part.name, *(signed_percent(part.errors[metric]) for metric in metrics)] for part in parts]
    total = [signed_percent(sum(part.errors[metric] for part in parts)) for metric in metrics]
    return [["part of the error", *metrics], *rows, ["total", *total]]


def largest_part(parts: Sequence[Part]) -> str:
    """Returns a sentence with the largest part of each metric; empty without parts."""
    found = []
    for metric in parts[0].errors if parts else ():
        errors = {part.name: part.errors[metric] for part in parts if not math.isnan(part.errors[metric])}
        if errors:
            name = max(errors, key=lambda name: abs(errors[name]))
            found.append(f"{metric}: {name}, {signed_percent(errors[name])}")
    return f"Largest part of the error: {'; '.join(found)}." if found else ""


def valued(value: float, unit: str) -> str:
    """Formats a value with its unit; seconds are shown as milliseconds."""
    if math.isnan(value):
        return numbers.MISSING
    if unit == "s":
        return f"{numbers.milliseconds(value)} ms"
    if unit == "share":
        return numbers.percent(value)
    return f"{numbers.number(value)} {unit if unit != 'requests' else ''}".strip()


def signed_percent(share: float | None) -> str:
    """Formats a percentage with its sign, unless it rounds to 0."""
    if share is None or math.isnan(share):
        return numbers.MISSING
    text = f"{100 * share:+.1f} %"
    return "0.0 %" if text[1:] == "0.0 %" else text


def plain_percent(share: float | None) -> str:
    """Formats a share as a percentage, without a sign."""
    return numbers.MISSING if share is None or math.isnan(share) else f"{100 * share:.1f} %"
