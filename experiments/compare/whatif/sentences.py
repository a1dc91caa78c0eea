"""Effects of each change as sentences, for the terminal, summary.json and the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from experiments.compare import sentences as compare
from experiments.compare.results import Comparison, Results
from experiments.compare.whatif.arms import Questions
from experiments.compare.whatif.settings import BASELINE
from experiments.study.figures import label_of, unit_of
from experiments.study.verdicts import LEVEL, interval_text, ratio_text
from sim.metrics.paired import Interval, Outcome, mean_interval
from sim.report.numbers import MISSING, number

LIMITS = "limits."
"""Prefix of the columns of the runs with the share of the requests' time of each resource."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Results of the baseline and all changes."""

    questions: Questions
    found: Results
    limits: dict[str, dict[str, Interval]]
    """Arm -> {resource: share of the requests' time over the seeds}, the largest share first."""

    @property
    def changes(self) -> list[str]:
        return [arm for arm in self.questions.experiment.arms if arm != BASELINE]


def limits_by_arm(runs: pd.DataFrame) -> dict[str, dict[str, Interval]]:
    """Returns the limits of `Answers` from the table of runs; a resource without a value counts as 0."""
    columns = [name for name in map(str, runs) if name.startswith(LIMITS)]
    found = {}
    for arm, rows in runs.groupby("arm", sort=False):
        shares = {name.removeprefix(LIMITS): mean_interval(rows[name].fillna(0.0)) for name in columns}
        known = {name: share for name, share in shares.items() if share.mean > 0}
        found[str(arm)] = dict(sorted(known.items(), key=lambda item: -item[1].mean))
    return found


def caveats(answers: Answers) -> list[str]:
    """Returns warnings about the results."""
    questions = answers.questions
    lines = compare.caveats(answers.found)
    if questions.num_requests is not None:
        lines.append(
            f"Each run simulates only the first {questions.num_requests:,} requests of the workload; for all "
            "of them, set whatif.requests=null."
        )
    for name in questions.other_traffic:
        lines.append(f"{name}: the traffic differs from the baseline's, so intervals are wider.")
    return lines


def left_out(answers: Answers) -> list[str]:
    """Returns a line for each change that does not apply, with the reason."""
    return [f"{name}: left out, {why}" for name, why in answers.questions.left_out.items()]


def verdicts(answers: Answers) -> list[str]:
    """Returns one sentence per change."""
    return [f"{arm}: {_verdict(answers, arm)}" for arm in answers.changes]


def limiting(answers: Answers, arm: str) -> str:
    """Returns the resource with the largest share of the requests' time, such as memory bandwidth."""
    return next(iter(answers.limits.get(arm, {})), MISSING)


def limit_text(answers: Answers, arm: str) -> str:
    """Returns the limiting resource with its share of the requests' time: memory bandwidth, 71 %."""
    name = limiting(answers, arm)
    return name if name == MISSING else f"{name}, {100 * answers.limits[arm][name].mean:.0f} %"


def value_text(comparison: Comparison) -> str:
    """Formats the metric with half its confidence interval: 119 ±12."""
    mean, low, high, _ = comparison.mean
    factor, _ = unit_of(comparison.metric)
    if math.isnan(mean):
        return MISSING
    if math.isnan(low) or comparison.mean.is_exact:
        return number(factor * mean)
    half = factor * (high - low) / 2
    return f"{number(factor * mean)} ±{f'{half:.2g}' if half < 100 else number(half)}"


def delta_text(comparison: Comparison) -> str:
    """Formats the change of a metric in %, from a factor of two on as ×2.05 ±0.03; of a share, in points."""
    paired = comparison.paired
    if paired is None or not paired.num_pairs:
        return MISSING
    if paired.same:
        return "="
    factor, unit = unit_of(comparison.metric)
    if unit == "%" or paired.ratio is None:
        return _with_half(paired.difference, factor, 0.0, "")
    if 0.5 <= paired.ratio.mean < 2:
        return _with_half(paired.ratio, 100.0, 1.0, "")
    return _with_half(paired.ratio, 1.0, 0.0, "×")


def _with_half(interval: Interval, factor: float, none: float, sign: str) -> str:
    """Formats the mean minus `none`, and the larger half of its interval, times the factor."""
    mean, low, high, _ = interval
    value, half = factor * (mean - none), factor * max(high - mean, mean - low)
    decimals = 2 if sign and abs(value) < 10 else 1 if abs(value) < 1000 else 0
    text = f"{sign}{value:,.{decimals}f}" if sign else f"{value:+,.{decimals}f}".replace("-", "−")
    return text if math.isnan(low) or interval.is_exact else f"{text} ±{half:,.{decimals}f}"


def _verdict(answers: Answers, arm: str) -> str:
    parts = [part for part in (_slo(answers, arm), *_directions(answers, arm)) if part]
    now, before = (limiting(answers, name) for name in (arm, BASELINE))
    if MISSING not in (now, before):
        comparison = "as before" if now == before else f"before: {limit_text(answers, BASELINE)}"
        parts.append(f"limited by {limit_text(answers, arm)} of the requests' time ({comparison})")
    return "; ".join(parts)


def _slo(answers: Answers, arm: str) -> str:
    """Returns a sentence on whether the SLO is met, with the attainment before; empty without an SLO."""
    target = answers.questions.targets.get(arm)
    of_share = [c for c in answers.found.comparisons if c.metric.key == "goodput.share"]
    now = next((c.mean for c in of_share if c.arm == arm), None)
    if target is None or now is None or math.isnan(now.mean):
        return ""
    base = next(c.mean for c in of_share if c.arm == BASELINE)
    verb = "meets" if now.mean >= target else "misses"
    doubt = "; the interval contains the target" if now.low < target < now.high else ""
    return (
        f"{verb} the SLO (attainment {100 * now.mean:.3g} %, target {100 * target:g} %, "
        f"before {100 * base.mean:.3g} %{doubt})"
    )


def _directions(answers: Answers, arm: str) -> list[str]:
    """Returns the metrics that become worse, and those that become better, beyond noise."""
    mine = [c for c in answers.found.comparisons if c.arm == arm and c.metric.key != "goodput.share"]
    parts = []
    for outcome in (Outcome.WORSE, Outcome.BETTER):
        sized = [f"{label_of(c.metric)} {_size(c)}" for c in mine if c.outcome is outcome]
        if sized:
            parts.append(f"{outcome.value}: {', '.join(sized)}")
    if not parts:
        unknown = any(c.outcome is Outcome.UNKNOWN for c in mine)
        parts.append("one seed gives no verdict" if unknown else "no difference beyond noise")
    return parts


def _size(comparison: Comparison) -> str:
    paired = comparison.paired
    if paired is None or paired.ratio is None:
        unit = unit_of(comparison.metric)[1]
        return f"{delta_text(comparison)} {unit}".strip()
    if paired.ratio.is_exact:
        return ratio_text(paired)
    return f"{ratio_text(paired)} ({interval_text(paired.ratio)})"


def introduction(seeds: Sequence[int]) -> str:
    """Returns the sentences above the table: the comparison, the seeds and the intervals."""
    return (
        f"Each change alone is compared with the baseline on the same requests, with {len(seeds)} "
        f"{'seed' if len(seeds) == 1 else 'seeds'}. "
        f"±: half the width of the {LEVEL}, paired by seed."
    )
