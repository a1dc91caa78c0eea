"""What a run says of its own worth: whether it was overloaded, where its warm-up ends, how sure it is."""

from __future__ import annotations

import math
from typing import Any

from sim.report import wording
from sim.report.numbers import milliseconds, number, seconds
from sim.report.wording import CLASS_LATENCIES, LATENCIES


def caveats(summary: dict[str, Any]) -> list[str]:
    """What a reader must know first: what the run found out about itself, then `wording.caveats`."""
    found = []
    if summary.get("overload"):
        found.append(_overload(summary["overload"]))
    if summary.get("warmup"):
        found.append(_warm_up(summary["warmup"]))
    return found + wording.caveats(summary)


def interval_lines(summary: dict[str, Any]) -> list[str]:
    """How sure the figures are, by this run alone, and which are not; nothing where that was not asked."""
    found = summary.get("intervals")
    if not found:
        return []
    known: list[str] = []
    lacking: dict[str, list[str]] = {}
    for section, key, label in _INTERVALS:
        one = found.get(section, {}).get(key)
        if one is None or summary[section][key] is None:
            continue
        if one["lack"] is not None:
            lacking.setdefault(one["lack"], []).append(label)
        else:
            known.append(f"{label} {_plus_minus(one, summary[section][key], key == 'share')}")
    level = f"{100 * found['confidence']:g} %"
    lines = [f"By this run alone, {level} sure: {', '.join(known)}"] if known else []
    lines += [f"No interval for {', '.join(labels)}: {lack}" for lack, labels in lacking.items()]
    return lines


_INTERVALS = (
    *(
        (name, key, f"{LATENCIES[name]} {key[:-2]}")
        for name in CLASS_LATENCIES
        for key in ("mean_s", "p99_s")
    ),
    ("throughput", "output_tokens_per_s", "output tok/s"),
    ("throughput", "requests_per_s", "requests/s"),
    ("goodput", "share", "SLO met"),
)
"""Sections and keys of the summary, and what they are called."""


def _plus_minus(one: dict[str, Any], value: float, is_share: bool) -> str:
    up, down = one["high"] - value, value - one["low"]
    if is_share:
        return _one_sided(one, value) if value in (0, 1) else f"± {100 * up:.1f} points"
    if not value:
        return "± 0"
    more, less = f"{100 * up / value:.2g}", f"{100 * down / value:.2g}"
    return f"± {more} %" if more == less else f"-{less} to +{more} %"


def _one_sided(one: dict[str, Any], value: float) -> str:
    """Of a share of all or of none; rounded towards what is less sure, with digits enough to differ."""
    beyond = 100 * (value - one["low"] if value else one["high"])
    digits = max(1, -math.floor(math.log10(beyond))) if beyond else 1
    # Rounding must not push a bound of exactly 3 % up to the next digit.
    beyond = math.ceil(beyond * 10**digits - 1e-6) / 10**digits
    return f"at least {100 - beyond:.{digits}f} %" if value else f"at most {beyond:.{digits}f} %"


def _overload(found: dict[str, Any]) -> str:
    return (
        f"Overloaded, and ended at {seconds(found['at_s'])}: from {seconds(found['since_s'])} on "
        f"{number(found['arrivals_per_s'])} requests/s came and {number(found['ends_per_s'])} ended, so the "
        f"backlog of {found['outstanding']:,} grows by {number(found['growth_per_s'])} /s "
        f"(99.9 % sure: by {number(found['least_growth_per_s'])} or more). Latencies only tell for how long."
    )


def _warm_up(found: dict[str, Any]) -> str:
    of_requests = f"{found['of_requests']:,} requests"
    series = {LATENCIES[name]: found[name] for name in LATENCIES if name in found}
    if not found["settled"]:
        moving = [label for label, one in series.items() if not one["settled"]]
        if not moving:
            return f"No steady state was found: nothing was answered. Of {of_requests} none was cut."
        return (
            f"No steady state was found ({found['method']}): {' and '.join(moving)} did not settle within "
            f"half of the {of_requests}, so no warm-up was cut. Longer, or less loaded, the run might."
        )
    if not found["requests"]:
        return f"No warm-up was found ({found['method']}, {of_requests}): nothing was cut."
    parts = (
        f"{label} after {one['requests']:,} ({milliseconds(one['mean_before_s'])} ms before, "
        f"{milliseconds(one['mean_after_s'])} ms from then on)"
        for label, one in series.items()
        if one["requests"]
    )
    return f"Warm-up found ({found['method']}), in order of arrival: {'; '.join(parts)}."
