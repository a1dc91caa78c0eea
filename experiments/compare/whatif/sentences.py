"""Effects of each change as sentences, for the terminal, summary.json and the page."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pandas as pd

from experiments.compare import sentences as compare
from experiments.compare.results import Comparison, Results
from experiments.compare.whatif.arms import Questions
from experiments.compare.whatif.settings import BASELINE
from experiments.study.figures import Metric, label_of, unit_of
from experiments.study.notes import expected_error_lines, merged_notes
from experiments.study.steady_state import REASONS, requests_needed
from experiments.study.verdicts import LEVEL, minus, with_sign
from sim.metrics.confidence import Interval, Outcome, mean_interval
from sim.report.numbers import MISSING, mean_text, supported

SHARE = "goodput.share"
TIMES = ("simulated_s", "e2e.p90_s")
MOST_NAMES = 3
"""Largest number of settings that a warning lists by name."""
SUBJECTS = {
    "goodput.requests_per_s": ("goodput", "", " requests/s"),
    "throughput.output_tokens_per_s": ("output throughput", "", " tokens/s"),
    "cost.usd_per_hour": ("cost per hour", "$", ""),
    "cost.usd_per_million_output_tokens": ("cost per million output tokens", "$", ""),
    "energy.joules_per_output_token": ("energy per output token", "", " J"),
}
"""Key of a metric -> the subject of a sentence on it, and the units before and after its value."""
LIMITS = "limits."
"""Prefix of the columns of the runs with the share of the requests' time of each resource."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Results of the baseline and all changes."""

    questions: Questions
    found: Results
    limits: dict[str, dict[str, Interval]]
    """Arm -> {resource: share of the requests' time over the seeds}, the largest share first."""
    times_s: dict[str, tuple[float, float]]
    """Arm -> length of a run and p90 of E2E in seconds, means over the seeds."""

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


def times_by_arm(runs: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """Returns `Answers.times_s` from the table of runs; arms without a value are left out."""
    if not {*TIMES} <= {*runs.columns}:
        return {}
    means = runs.groupby("arm", sort=False)[list(TIMES)].mean().dropna()
    return {str(row.Index): (float(row[1]), float(row[2])) for row in means.itertuples()}


def caveats(answers: Answers) -> list[str]:
    """Returns warnings about the results."""
    questions = answers.questions
    lines = compare.caveats(answers.found)
    if questions.num_requests is not None:
        lines.append(
            f"Each run simulates only the first {questions.num_requests:,} requests of the workload; for all "
            "of them, set whatif.requests=null."
        )
    lines += _too_short(answers)
    for name in questions.other_traffic:
        lines.append(f"{name}: the traffic differs from the baseline's, so intervals are wider.")
    return [*lines, *expected_error_lines(merged_notes(answers.found.runs.notes))]


def _too_short(answers: Answers) -> list[str]:
    """Returns, for each reason why runs are too short for goodput, a sentence with the requests needed."""
    questions = answers.questions
    by_reason: dict[str, dict[str, int]] = {}
    for arm, (num_requests, lasts_s) in questions.arrivals.items():
        if arm not in questions.targets or arm not in answers.times_s:
            continue
        ends_s, e2e_p90_s = answers.times_s[arm]
        target = questions.targets[arm]
        needed = requests_needed(
            num_requests, lasts_s=lasts_s, ends_s=ends_s, e2e_p90_s=e2e_p90_s, target=target
        )
        for reason, least in needed.items():
            by_reason.setdefault(reason, {})[arm] = least
    lines = []
    for reason, needed in by_reason.items():
        most = max(needed.values())
        is_limited = questions.num_requests is not None
        remedy = f"set whatif.requests={most}" if is_limited else "use a workload with more"
        names, of_all = list(needed), len(questions.experiment.arms)
        arms = ", ".join(names) if len(names) <= MOST_NAMES else f"{len(names)} of {of_all} settings"
        lines.append(
            f"Too short for goodput ({arms}): {REASONS[reason]}; at least {most:,} requests are needed, so "
            f"{remedy}."
        )
    return lines


def left_out(answers: Answers) -> list[str]:
    """Returns a line for each change that does not apply, with the reason."""
    return [f"{name}: left out, {why}" for name, why in answers.questions.left_out.items()]


def verdicts_by_change(answers: Answers) -> dict[str, list[str]]:
    """Returns change -> a sentence on the SLO, one per changed figure, one on the others and on the limit."""
    return {
        arm: [line for line in (_slo(answers, arm), *_outcomes(answers, arm), _limit(answers, arm)) if line]
        for arm in answers.changes
    }


def verdicts(answers: Answers) -> list[str]:
    """Returns the sentences on all changes; each begins with the name of the change."""
    return [f"{arm}: {line}" for arm, lines in verdicts_by_change(answers).items() for line in lines]


def limiting(answers: Answers, arm: str) -> str:
    """Returns the resource with the largest share of the requests' time, such as memory bandwidth."""
    return next(iter(answers.limits.get(arm, {})), MISSING)


def limit_text(answers: Answers, arm: str) -> str:
    """Returns the limiting resource with its share of the requests' time: memory bandwidth, 71 %."""
    name = limiting(answers, arm)
    return name if name == MISSING else f"{name}, {100 * answers.limits[arm][name].mean:.0f} %"


def value_text(comparison: Comparison) -> str:
    """Formats the metric with half its confidence interval: 119 ±12."""
    factor, _ = unit_of(comparison.metric)
    shown = supported(comparison.mean, factor)
    return mean_text(comparison.mean, factor) if shown is None else f"{shown.mean} ±{shown.half_width}"


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
    shown = supported(minus(interval, none), factor)
    value = factor * (interval.mean - none)
    decimals = 2 if sign and abs(value) < 10 else 1 if abs(value) < 1000 else 0
    mean = f"{value:,.{decimals}f}" if shown is None else shown.mean
    text = f"{sign}{mean}" if sign else with_sign(mean)
    return text if shown is None else f"{text} ±{shown.half_width}"


def _limit(answers: Answers, arm: str) -> str:
    now, before = (limiting(answers, name) for name in (arm, BASELINE))
    if MISSING in (now, before):
        return ""
    change = "as before" if now == before else f"before: {limit_text(answers, BASELINE)}"
    return f"The limit is {limit_text(answers, arm)} of the requests' time ({change})."


def _slo(answers: Answers, arm: str) -> str:
    """Returns a sentence on SLO attainment and on whether the SLO is met; empty without an SLO."""
    target = answers.questions.targets.get(arm)
    of_share = [c for c in answers.found.comparisons if c.metric.key == SHARE]
    now = next((c for c in of_share if c.arm == arm), None)
    if target is None or now is None or math.isnan(now.mean.mean):
        return ""
    before = next(c.mean.mean for c in of_share if c.arm == BASELINE)
    mean, low, high, _ = now.mean
    is_met, was_met = mean >= target, before >= answers.questions.targets.get(BASELINE, target)
    verb = ("is still met" if was_met else "is now met") if is_met else "is now missed"
    verb = verb if is_met or was_met else "is still missed"
    share, from_share = f"{100 * mean:.3g} %", f"{100 * before:.3g} %"
    change = {
        Outcome.WORSE: f"falls from {from_share} to {share}",
        Outcome.BETTER: f"rises from {from_share} to {share}",
        Outcome.EQUAL: f"stays at {share}",
        Outcome.NO_DIFFERENCE: f"is {share}, no difference beyond noise from {from_share}",
    }.get(now.outcome or Outcome.UNKNOWN, f"is {share}, before {from_share}")
    doubt = "; its interval contains the target" if low < target < high else ""
    return f"The SLO {verb}: attainment {change} (target {100 * target:g} %{doubt})."


def _outcomes(answers: Answers, arm: str) -> list[str]:
    """Returns a sentence for each metric that changes beyond noise, and one on the others."""
    mine = [c for c in answers.found.comparisons if c.arm == arm and c.metric.key != SHARE]
    changed = [c for c in mine if c.outcome in (Outcome.WORSE, Outcome.BETTER)]
    lines = [_changed(c, answers.found.of(c.metric, BASELINE)[0]) for c in changed]
    unknown = [c for c in mine if c.outcome is Outcome.UNKNOWN]
    if unknown and answers.found.traced:
        names = ", ".join(_subject(c.metric)[0] for c in unknown)
        lines.append(f"No interval, so no verdict: {names}.")
    elif unknown:
        lines.append("One seed gives no verdict on figures.")
    if same := [_subject(c.metric)[0] for c in mine if c not in [*changed, *unknown]]:
        lines.append(f"No difference beyond noise: {', '.join(same)}.")
    return lines


def _changed(comparison: Comparison, baseline: Comparison) -> str:
    """Returns a sentence such as: TTFT p99 rises by 41.9 %, from 167 ms to 237 ms (worse)."""
    assert comparison.paired is not None
    assert comparison.outcome is not None
    subject, before, after = _subject(comparison.metric)
    factor, _ = unit_of(comparison.metric)
    old, new = (f"{before}{mean_text(one.mean, factor)}{after}" for one in (baseline, comparison))
    ratio = comparison.paired.ratio
    rises = comparison.paired.difference.mean > 0
    if ratio is None:
        by = ""
    elif 0.5 <= ratio.mean < 2:
        by = f" by {mean_text(minus(ratio, 1.0), 100 if rises else -100)} %,"
    else:
        by = f" to {mean_text(ratio)} times its value,"
    verb = "rises" if rises else "falls"
    return f"{subject[0].upper()}{subject[1:]} {verb}{by} from {old} to {new} ({comparison.outcome.value})."


def _subject(metric: Metric) -> tuple[str, str, str]:
    """Returns the subject of a sentence on a metric, and the units before and after its value."""
    unit = unit_of(metric)[1]
    return SUBJECTS.get(metric.key, (label_of(metric), "", f" {unit}" if unit else ""))


def introduction(answers: Answers) -> str:
    """Returns the sentences above the table: the comparison, the seeds and the intervals."""
    num_seeds = len(answers.questions.settings.seeds)
    seeds, pairs = f"with {num_seeds} seed{'s' * (num_seeds != 1)}", "paired by seed"
    if answers.found.traced:
        seeds, pairs = "those of a trace", "paired by blocks of the trace"
    return (
        f"Each change alone is compared with the baseline on the same requests, {seeds}. "
        f"±: half the width of the {LEVEL}, {pairs}."
    )
