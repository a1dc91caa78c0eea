"""Verdicts of a comparison as sentences, for the terminal, summary.json and compare.html."""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.compare.results import Comparison, Judged, Results
from experiments.study.figures import Metric, label_of, unit_of
from experiments.study.trace_runs import blocks_text
from experiments.study.verdicts import LEVEL, interval_text, ratio_text, signed, with_sign
from sim.metrics.confidence import Held, Outcome, Paired
from sim.report.numbers import supported
from sim.settings.build import shown

HELD = {Held.HELD: "held", Held.MISSED: "not held", Held.UNDECIDED: "not decided"}


def verdicts(found: Results) -> list[str]:
    """Returns one line per expectation, then one per metric and arm other than the baseline."""
    others = [arm for arm in found.experiment.arms if arm != found.experiment.baseline]
    lines = [_expectation(found, judged) for judged in found.judged]
    for metric in found.experiment.metrics:
        for arm in others:
            along = found.of(metric, arm)
            lines.append(_verdict(found, along[0]) if len(along) == 1 else _swept(found, along))
    return lines


def caveats(found: Results) -> list[str]:
    """Returns warnings about the results."""
    experiment, lines = found.experiment, []
    if found.runs.interrupted:
        lines.append(f"Interrupted after {len(found.runs.table):,} of {experiment.num_runs:,} runs.")
    if found.traced:
        lines.append(blocks_text([comparison.mean for comparison in found.comparisons]))
    elif len(experiment.seeds) < 2:
        lines.append(
            "One seed gives no confidence interval, so differences cannot be distinguished from noise; use "
            "at least two seeds."
        )
    elif len(experiment.seeds) < 5:
        lines.append(f"With only {len(experiment.seeds)} seeds, intervals are wide; five are usual.")
    if found.clipped_apart:
        lines.append(
            "The arms truncated different numbers of requests to their model's context length, "
            "so their traffic is not quite the same."
        )
    missing: dict[tuple[str, str], int] = {}
    for comparison in found.comparisons:
        lacking = len(experiment.seeds) - comparison.mean.num_values
        if lacking and not found.runs.interrupted and not (found.traced and comparison.mean.num_values):
            key = (label_of(comparison.metric), comparison.arm)
            missing[key] = missing.get(key, 0) + lacking
    total = len(experiment.seeds) * len(experiment.swept)
    for (metric, arm), count in missing.items():
        runs = "1 run" if total == 1 else f"{total} runs"
        lines.append(f"{metric} has no value in {count} of {runs} of {arm}; these are left out.")
    return lines


def _verdict(found: Results, comparison: Comparison) -> str:
    arm, baseline, label = comparison.arm, found.experiment.baseline, label_of(comparison.metric)
    paired, outcome = comparison.paired, comparison.outcome
    assert paired is not None
    if outcome is Outcome.UNKNOWN:
        pairs = {0: "no seed has", 1: "only one seed has"}[paired.num_pairs]
        if found.traced and paired.num_pairs:
            return f"{arm} against {baseline}: no verdict on {label}, {_size(comparison)}; it has no interval"
        return f"{arm} against {baseline}: no verdict on {label}; {pairs} a value in both arms"
    if outcome is Outcome.EQUAL:
        return f"{arm} against {baseline}: {label} is the same{_pairs(found, paired)}"
    amount = _amount(found, paired, comparison.metric)
    if outcome is Outcome.NO_DIFFERENCE:
        return f"{arm} against {baseline}: {label}, no difference beyond noise, {amount}"
    return f"{arm} {'beats' if outcome is Outcome.BETTER else 'loses to'} {baseline}: {label} {amount}"


def _amount(found: Results, paired: Paired, metric: Metric) -> str:
    seeds = f"{paired.num_pairs} {found.pairs}"
    if paired.ratio is None:
        factor, unit = unit_of(metric)
        in_unit = f" {unit}" if unit else ""
        texts = supported(paired.difference, factor)
        if texts is None:
            return f"{signed(factor * paired.difference.mean)}{in_unit} in {found.every} ({seeds})"
        mean, low, high = map(with_sign, (texts.mean, texts.low, texts.high))
        return f"{mean}{f' {unit}' if unit else ''} ({LEVEL} {low} to {high}, {seeds})"
    if paired.ratio.is_exact:
        return f"{ratio_text(paired)} in {found.every} ({seeds})"
    return f"{ratio_text(paired)} ({LEVEL} {interval_text(paired.ratio)}, {seeds})"


def _swept(found: Results, along: Sequence[Comparison]) -> str:
    """Returns one line for all swept values: those with a better, a worse and no different metric."""
    experiment, label = found.experiment, label_of(along[0].metric)
    assert experiment.sweep is not None
    axis = experiment.sweep.label or experiment.sweep.key
    by_outcome: dict[str, list[Comparison]] = {}
    for comparison in along:
        same = comparison.outcome in (Outcome.EQUAL, Outcome.NO_DIFFERENCE)
        name = "no difference beyond noise" if same else "unknown"
        if comparison.outcome in (Outcome.BETTER, Outcome.WORSE):
            name = comparison.outcome.value
        by_outcome.setdefault(name, []).append(comparison)
    parts = []
    for name in ("better", "worse", "no difference beyond noise", "unknown"):
        where = by_outcome.get(name, [])
        if not where:
            continue
        at = [shown(comparison.swept) for comparison in where]
        sized = name in ("better", "worse")
        if sized:
            at = [f"{value} ({_size(c)})" for value, c in zip(at, where, strict=True)]
        if len(where) == len(along):
            parts.append(f"{name} at every value{': ' + ', '.join(at) if sized else ''}")
        else:
            parts.append(f"{name} at {', '.join(at)}")
    return f"{along[0].arm} against {experiment.baseline} over {axis}: {label} {'; '.join(parts)}"


def _size(comparison: Comparison) -> str:
    """Formats the ratio, or the difference if there is no ratio."""
    assert comparison.paired is not None
    if comparison.paired.ratio is not None:
        return ratio_text(comparison.paired)
    factor, unit = unit_of(comparison.metric)
    return f"{signed(factor * comparison.paired.difference.mean)} {unit}".strip()


def _expectation(found: Results, judged: Judged) -> str:
    asked, sweep = judged.expectation, found.experiment.sweep
    label = label_of(found.experiment.metric(asked.metric))
    bounds = [
        f"{words} ×{bound:g}"
        for words, bound in (("at least", asked.at_least_ratio), ("at most", asked.at_most_ratio))
        if bound is not None
    ]
    at = f" at {sweep.label or sweep.key} {shown(judged.swept)}" if sweep else ""
    ratio = judged.paired.ratio
    if ratio is None or math.isnan(ratio.mean):
        outcome = "no ratio can be formed"
    elif math.isnan(ratio.low):
        outcome = f"{ratio_text(judged.paired)}, {'it has' if found.traced else 'one seed gives'} no interval"
    elif ratio.is_exact:
        outcome = f"{ratio_text(judged.paired)} in {found.every}"
    else:
        outcome = f"{ratio_text(judged.paired)}, {LEVEL} {interval_text(ratio)}"
    return (
        f"Expected: {label} of {asked.arm} {' and '.join(bounds)} that of {judged.over}{at}: "
        f"{HELD[judged.held]} ({outcome})"
    )


def _pairs(found: Results, paired: Paired) -> str:
    return "" if found.traced else f" in {found.every} ({paired.num_pairs} {found.pairs})"
