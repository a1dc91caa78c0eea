"""The text on a thinned fleet, for the terminal and the report."""

from __future__ import annotations

from typing import Any

from sim.metrics.paired import Interval
from sim.report.numbers import MISSING, bounds_text, mean_text, number


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
