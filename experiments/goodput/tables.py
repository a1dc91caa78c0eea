"""Highest rates as a table, as sentences and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from experiments.app.terminal import print_tables
from experiments.goodput.answer import Outcome
from experiments.goodput.results import Highest
from experiments.study.notes import expected_error_lines, merged_notes
from experiments.study.verdicts import LEVEL
from sim.metrics.confidence import Interval
from sim.metrics.confidence import Outcome as Verdict
from sim.metrics.definitions import plain_json
from sim.report.numbers import MISSING, bounds_text, mean_text, number, supported, with_interval
from sim.report.wording import LATENCIES

SAME_RUN = "The traffic is the same for every seed and nothing else is random, so there is one run at a rate"
OF_BLOCKS = (
    f"{SAME_RUN}; intervals are from blocks of consecutive requests (moving-block bootstrap): that of a rate "
    "ends at tried rates whose SLO attainment is surely above, and surely below, the target."
)
NO_INTERVAL = (
    f"{SAME_RUN} and no confidence interval of the highest rate: the trace is too short, or too much of one "
    "trend, for ten independent blocks, or no tried rate is surely within the SLO, or none surely beyond it."
)
HEADINGS = (
    "arm",
    "requests/s",
    "requests/s per GPU",
    "TTFT p90, ms",
    "TPOT p90, ms",
    "$ per M output tokens",
    "fails first",
)


def print_goodput(highest: Sequence[Highest], warnings: Sequence[str], console: Console) -> None:
    """Prints the verdicts, the warnings and the table."""
    for sentence in sentences(highest):
        console.print(Text(sentence), soft_wrap=True)
    for warning in warnings:
        console.print(Text(f"  {warning}", style="yellow"))
    print_tables([rows(highest)], console)


def caveats(outcome: Outcome) -> list[str]:
    """Returns warnings about the results, and their expected errors."""
    settings, found = outcome.settings, []
    has_interval = any(supported(one.rate) is not None for one in outcome.highest)
    if outcome.is_one_run:
        found.append(OF_BLOCKS if has_interval else NO_INTERVAL)
    elif len(settings.seeds) < 2:
        found.append("One seed gives no confidence interval; use two or more.")
    within = f"The highest rate of each seed is found to within {100 * settings.precision:g} %"
    found.append(f"{within}, which its interval includes." if has_interval else f"{within}.")
    for one in outcome.highest:
        if one.arm.requests_per_session is not None and one.rate.mean > 0:
            found.append(
                f"{one.arm.name}: its requests come in sessions of {number(one.arm.requests_per_session)} on "
                f"average, so the rate is that of {mean_text(one.sessions_per_s)} sessions/s."
            )
    return [*found, *expected_error_lines(merged_notes(outcome.notes))]


def rows(highest: Sequence[Highest]) -> list[list[str]]:
    """Returns the table: the heading, then one row per arm, best arm first."""
    return [list(HEADINGS), *([one.arm.name, *_cells(one)] for one in highest)]


def sentences(highest: Sequence[Highest]) -> list[str]:
    """Returns a sentence on the best arm, then one per other arm, compared with it."""
    best = highest[0]
    terms = ", ".join(f"{LATENCIES[t]} {1e3 * s:g} ms" for t, s in best.arm.slo.limits_s.items())
    if best.rate.mean == 0 and best.is_open:
        return [_unknown(best)]
    if best.rate.mean == 0:
        reason = _missed_at_any_rate(best)
        return [f"{best.arm.name}: misses the SLO ({terms}) at all tried rates; {reason}"]
    if best.is_open:
        return [_open_sentence(one) if one.is_open else _alone(one) for one in highest]
    lines = [
        f"{best.arm.name}: {mean_text(best.rate)} requests/s{_bounds(best.rate)} with "
        f"{100 * best.arm.target:g} % of requests within {terms}; {_why(best)}"
    ]
    for other in highest[1:]:
        if other.is_open:
            lines.append(_unknown(other) if other.rate.mean == 0 else _open_sentence(other))
            continue
        if other.rate.mean == 0:
            lines.append(f"{other.arm.name}: misses the SLO at all tried rates; {_missed_at_any_rate(other)}")
            continue
        assert other.best is not None
        ratio = other.best.ratio
        against = "with some seeds it misses the SLO at all tried rates"
        if ratio is not None:
            same = other.best.outcome("higher") in (Verdict.NO_DIFFERENCE, Verdict.EQUAL)
            against = f"{mean_text(ratio)} times the best{_bounds(ratio)}"
            against += ", no difference beyond noise" * same
        lines.append(f"{other.arm.name}: {mean_text(other.rate)} requests/s, {against}; {_why(other)}")
    return lines


def _open_sentence(one: Highest) -> str:
    return (
        f"{one.arm.name}: at least {mean_text(one.rate)} requests/s; the traffic is too short for a higher "
        f"rate: {one.lack}; {MORE}"
    )


MORE = "raise goodput.max_requests, or use a workload with more requests"


def _unknown(one: Highest) -> str:
    return f"{one.arm.name}: no rate is known to meet the SLO; the traffic is too short: {one.lack}; {MORE}"


def _alone(one: Highest) -> str:
    return f"{one.arm.name}: {mean_text(one.rate)} requests/s{_bounds(one.rate)}; {_why(one)}"


def to_json(highest: Sequence[Highest]) -> list[dict[str, Any]]:
    """Returns the figures of each arm as plain values; a figure that does not exist is null."""
    return [
        {
            "arm": one.arm.name,
            "target": one.arm.target,
            "devices": one.arm.num_devices,
            "highest_rate_per_s": plain_json(one.rate._asdict()),
            "highest_rate_per_s_and_device": one.rate_per_device,
            "is_at_least": one.is_open,
            "too_short": one.lack,
            "sessions_per_s": plain_json(one.sessions_per_s._asdict()),
            "goodput_per_s": plain_json(one.goodput_per_s._asdict()),
            "figures": {key: plain_json(value._asdict()) for key, value in one.figures.items()},
            "share_just_above": plain_json(one.share_above._asdict()),
            "limiting": one.limiting,
            "ratio_to_best": None
            if one.best is None or one.best.ratio is None
            else plain_json(one.best.ratio._asdict()),
        }
        for one in highest
    ]


def _cells(one: Highest) -> list[str]:
    figures = one.figures
    tried = f"≥ {mean_text(one.rate)}"
    return [
        tried if one.is_open else with_interval(one.rate),
        MISSING if one.is_open else with_interval(one.rate, 1 / one.arm.num_devices),
        with_interval(figures["ttft.p90_s"], 1e3),
        with_interval(figures["tpot.p90_s"], 1e3),
        with_interval(figures["cost.usd_per_million_output_tokens"]),
        MISSING if one.limiting is None or one.is_open else LATENCIES.get(one.limiting, one.limiting),
    ]


def _why(one: Highest) -> str:
    if one.limiting is None:
        return "no tried rate misses the SLO"
    if one.limiting == "overload":
        return "at higher rates the backlog grows without bound"
    return f"at higher rates {LATENCIES[one.limiting]} fails first"


def _missed_at_any_rate(one: Highest) -> str:
    if one.limiting in (None, "overload"):
        return "the service is overloaded"
    share = one.share_above.mean
    return (
        f"{LATENCIES[str(one.limiting)]} fails first (SLO attainment {100 * share:.3g} % at the lowest rate)"
    )


def _bounds(interval: Interval) -> str:
    return "" if supported(interval) is None else f" ({LEVEL} {bounds_text(interval)})"
