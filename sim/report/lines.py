"""Texts on the validity of a run's figures: overload, warm-up, confidence intervals and thinned fleets."""

from __future__ import annotations

import math
from typing import Any

from sim.metrics.confidence import Interval
from sim.report import wording
from sim.report.numbers import (
    MISSING,
    bounds_text,
    decimals_of,
    mean_text,
    milliseconds,
    number,
    rounded,
    seconds,
)
from sim.report.wording import CLASS_LATENCIES, LATENCIES


def caveats(summary: dict[str, Any]) -> list[str]:
    """Returns the sentences above the figures: overload, warm-up, then `wording.caveats`."""
    found = []
    if summary.get("overload"):
        found.append(_overload(summary["overload"]))
    if summary.get("warmup"):
        found.append(_warm_up(summary["warmup"]))
    return found + wording.caveats(summary)


def interval_lines(summary: dict[str, Any]) -> list[str]:
    """Returns lines: the error of estimated percentiles, intervals from this run alone, those that lack.

    A thinned fleet has the intervals of the whole fleet instead.
    """
    if of_whole := thinned_lines(summary):
        return of_whole
    error = summary.get("percentile_error")
    some = " of ITL and of classes" if "exact_percentiles" in summary else ""
    lines = (
        [] if error is None else [f"Percentiles{some} are estimates, within {100 * error:.2g} % of the value"]
    )
    found = summary.get("intervals")
    if not found:
        return lines
    known: list[str] = []
    lacking: dict[str, list[str]] = {}
    for section, key, label in _INTERVALS:
        one = found.get(section, {}).get(key)
        if one is None or summary[section][key] is None:
            continue
        if one["lack"] is not None:
            lacking.setdefault(one["lack"], []).append(label)
        else:
            known.append(f"{label} {_bounds(one, summary[section][key], key == 'share')}")
    level = f"{100 * found['confidence']:g} %"
    if known:
        lines.append(f"{level} confidence (single run): {', '.join(known)}")
    lines += [f"No confidence interval for {', '.join(labels)}: {lack}" for lack, labels in lacking.items()]
    return lines


_INTERVALS = (
    *(
        (name, key, f"{LATENCIES[name]} {key[:-2]}")
        for name in CLASS_LATENCIES
        for key in ("mean_s", "p99_s")
    ),
    ("throughput", "output_tokens_per_s", "output tok/s"),
    ("throughput", "requests_per_s", "requests/s"),
    ("goodput", "share", "SLO attainment"),
)
"""Section and key of each figure in the summary, and its label."""


def _bounds(one: dict[str, Any], value: float, is_share: bool) -> str:
    """Returns the bounds of an interval relative to its figure, with the digits that they support."""
    if is_share and value in (0, 1):
        return _one_sided(one, value)
    up, down = one["high"] - value, value - one["low"]
    if not value or max(up, down) <= 0:
        return "± 0"
    factor, unit = (100.0, "points") if is_share else (100 / value, "%")
    decimals = decimals_of(factor * max(up, down))
    more, less = (rounded(factor * side, decimals) for side in (up, down))
    return f"± {more} {unit}" if more == less or is_share else f"-{less} to +{more} {unit}"


def _one_sided(one: dict[str, Any], value: float) -> str:
    """Returns the bound of a share of 0 or 1, rounded outwards to enough digits to differ from the share."""
    beyond = 100 * (value - one["low"] if value else one["high"])
    digits = max(1, -math.floor(math.log10(beyond))) if beyond else 1
    # The tolerance keeps a bound of exactly 3 %, up to rounding errors, from being rounded up.
    beyond = math.ceil(beyond * 10**digits - 1e-6) / 10**digits
    return f"≥ {100 - beyond:.{digits}f} %" if value else f"≤ {beyond:.{digits}f} %"


def _overload(found: dict[str, Any]) -> str:
    return (
        f"Overloaded; the run was stopped at {seconds(found['at_s'])}. Since {seconds(found['since_s'])}, "
        f"{number(found['arrivals_per_s'])} requests/s arrived and {number(found['ends_per_s'])} finished. "
        f"The backlog of {found['outstanding']:,} requests grows by {number(found['growth_per_s'])} "
        f"requests/s (99.9 % confidence: ≥ {number(found['least_growth_per_s'])}). "
        "Latencies depend on how long the run lasted."
    )


def _warm_up(found: dict[str, Any]) -> str:
    of_requests = f"{found['of_requests']:,} requests"
    series = {LATENCIES[name]: found[name] for name in LATENCIES if name in found}
    if not found["settled"]:
        moving = [label for label, one in series.items() if not one["settled"]]
        if not moving:
            return f"No steady state: none of the {of_requests} finished, so no warm-up was removed."
        return (
            f"No steady state ({found['method']}): {' and '.join(moving)} did not settle within the first "
            f"half of the {of_requests}, so no warm-up was removed. Try a longer run or a lower load."
        )
    if not found["requests"]:
        return f"No warm-up detected ({found['method']}, {of_requests}): nothing was removed."
    parts = (
        f"{label}: the first {one['requests']:,} requests (mean {milliseconds(one['mean_before_s'])} ms, "
        f"later ones {milliseconds(one['mean_after_s'])} ms)"
        for label, one in series.items()
        if one["requests"]
    )
    return f"Warm-up detected and removed ({found['method']}). {'; '.join(parts)}."


def thinned_lines(summary: dict[str, Any]) -> list[str]:
    """Returns lines on the figures of the whole fleet; none if all of it was simulated."""
    found = summary.get("thinned")
    if not found:
        return []
    one_in = found["keeps_one_in"]
    units = {"request": "requests", "session": "sessions", "family": "families of prompts"}[found["unit"]]
    lines = [
        f"Thinned: {found['replicas']:,} of {found['of_replicas']:,} replicas were simulated, with one in "
        f"{one_in} {units}. The figures above are of this part; maxima and peaks of the whole are larger."
    ]
    if found["ttft"]["mean_s"]["value"] is None:
        return [*lines, "No request of this part has a token, so nothing is known of the fleet: thin less."]
    rates = found.get("throughput")
    texts = []
    if rates:
        texts = [
            f"{_between(rates['requests_per_s'])} requests/s",
            f"{_between(rates['output_tokens_per_s'])} output tok/s",
        ]
    if (usd := summary["cost"]["usd"]) is not None:
        texts.append(f"${number(one_in * usd)}")
    texts += [
        f"{name.upper()} {key[:-2]} {_between(found[name][key], 1e3)} ms"
        for name in ("ttft", "tpot")
        for key in ("mean_s", "p99_s")
        if found[name][key]["value"] is not None
    ]
    if "goodput" in found:
        texts.append(f"SLO attainment {_between(found['goodput']['share'], 100)} %")
    level = f"{100 * found['confidence']:g} %"
    return [*lines, f"Whole fleet ({level} intervals, the error of thinning included): {', '.join(texts)}"]


def _between(figure: dict[str, float | None], factor: float = 1.0) -> str:
    """Returns a figure, times a factor, with its bounds: with the digits that they support."""
    value, low, high = (figure[key] for key in ("value", "low", "high"))
    if value is None or low is None or high is None:
        bounds = ("unknown" if bound is None else number(factor * bound) for bound in (low, high))
        return f"{number(None if value is None else factor * value)} ({' to '.join(bounds)})"
    interval = Interval(value, low, high, 2)
    bounds_known = bounds_text(interval, factor)
    return mean_text(interval, factor) + (f" ({bounds_known})" if bounds_known != MISSING else "")
