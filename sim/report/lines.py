"""Lines of text about a run, for the terminal and the report.

They cover the validity of its metrics (overload, warm-up, confidence intervals, thinned fleets), failures,
retries and scaling, the view of clients and agent tasks, and caches, preemptions, waiting times, pipelines,
transfers, migrations and speculation.
"""

from __future__ import annotations

import math
from typing import Any

from sim.metrics.confidence import Interval
from sim.report import wording
from sim.report.numbers import (
    MISSING,
    amount_of_kv,
    bounds_text,
    decimals_of,
    mean_text,
    milliseconds,
    number,
    percent,
    percent_at_least,
    rounded,
    seconds,
)
from sim.report.wording import CLASS_LATENCIES, LATENCIES, WAITS, plural


def caveats(summary: dict[str, Any]) -> list[str]:
    """Returns the sentences above the metrics: overload, warm-up, then `wording.caveats`."""
    found = []
    if summary.get("overload"):
        found.append(_overload(summary["overload"]))
    if summary.get("warmup"):
        found.append(_warm_up(summary["warmup"]))
    return found + wording.caveats(summary)


def interval_lines(summary: dict[str, Any]) -> list[str]:
    """Returns lines on the error of estimated percentiles, intervals from this run, and missing intervals.

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
"""Section and key of each metric in the summary, and its label."""


def _bounds(one: dict[str, Any], value: float, is_share: bool) -> str:
    """Returns the bounds of an interval relative to its metric, with significant digits."""
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
    """Returns the bound of a share of 0 or 1, rounded outwards so that it differs from the share."""
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
    """Returns lines on the metrics of the whole fleet; none if all of it was simulated."""
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
    """Returns a metric times a factor, with its bounds and significant digits."""
    value, low, high = (figure[key] for key in ("value", "low", "high"))
    if value is None or low is None or high is None:
        bounds = ("unknown" if bound is None else number(factor * bound) for bound in (low, high))
        return f"{number(None if value is None else factor * value)} ({' to '.join(bounds)})"
    interval = Interval(value, low, high, 2)
    bounds_known = bounds_text(interval, factor)
    return mean_text(interval, factor) + (f" ({bounds_known})" if bounds_known != MISSING else "")


def fleet_lines(summary: dict[str, Any]) -> list[str]:
    """Returns lines on failures, retries and scaling, if there are any."""
    return [line for line in (_failures(summary), _retries(summary), _scaling(summary)) if line]


def _failures(summary: dict[str, Any]) -> str:
    figures = summary.get("troubles")
    if not figures or not figures["by_kind"]:
        return ""
    others = [
        f"{kind.replace('_', ' ')} {seconds(found['replica_s'])}"
        + (f" ({found['count']:,} events)" if found["count"] > 1 else "")
        for kind, found in figures["by_kind"].items()
        if kind not in ("crash", "host_out_of_memory")
    ]
    if not figures["crashes"]:
        return f"Failures: {'; '.join(others) or 'crashes of replicas that were not serving'}"
    return "".join(f"; {part}" if place else part for place, part in enumerate([_crashes(figures), *others]))


def _crashes(figures: dict[str, Any]) -> str:
    return (
        f"Failures: {plural(figures['crashes'], 'crash', 'crashes')}, replicas down for "
        f"{seconds(figures['replica_down_s'])} ({percent(figures['down_share'])} of their time); "
        f"{plural(figures['lost_tokens'], 'output token')} lost, "
        f"{plural(figures['resends'], 'request')} resent by the service{_recovered(figures)}"
    )


def _recovered(figures: dict[str, Any]) -> str:
    """Returns the text on resumed requests and on recomputed and restored KV; empty without resends."""
    if not figures.get("resends"):
        return ""
    text = f" ({figures['resumed']:,} resumed at their last token)" if figures["resumed"] else ""
    text += f"; KV of {plural(figures['recomputed_tokens'], 'token')} recomputed"
    if figures["mirrored_bytes"]:
        text += (
            f", of {figures['restored_tokens']:,} restored ({figures['restored_bytes'] / 1e9:,.3g} of "
            f"{number(figures['mirrored_bytes'] / 1e9)} GB replicated)"
        )
    return text


def _retries(summary: dict[str, Any]) -> str:
    figures = summary.get("retries")
    if not figures or not (figures["retries"] or figures["failed_attempts"]):
        return ""
    failed = sorted(figures["failed_attempts"].items(), key=lambda item: (-item[1], item[0]))
    reasons = "; ".join(f"{reason} {count:,}" for reason, count in failed)
    return (
        f"Attempts: {figures['attempts']:,} by clients, {number(figures['attempts_per_request'])} per "
        f"request, {sum(count for _, count in failed):,} failed ({reasons})"
    )


def _scaling(summary: dict[str, Any]) -> str:
    figures = summary.get("scaling")
    if not figures or not (figures["starts"] or figures["drains"]):
        return ""
    return (
        f"Replicas: mean {number(figures['mean_replicas'])} billed "
        f"({number(figures['mean_serving'])} serving), maximum {figures['max_replicas']:,}; "
        f"{figures['starts']:,} started, {figures['drains']:,} drained; "
        f"{number(figures['device_hours'])} GPU-hours"
    )


def traffic_lines(summary: dict[str, Any]) -> list[str]:
    """Returns lines on time to publish, reading and complete tasks; none if the workload lacks them.

    Those of the parts of a mix begin with the name of the part.
    """
    lines = [line for line in (_publish(summary), _reading(summary), _tasks(summary)) if line]
    for name, sections in summary.get("by_part", {}).items():
        lines += [f"Part {name}: {line[0].lower()}{line[1:]}" for line in traffic_lines(sections)]
    return lines


def _publish(summary: dict[str, Any]) -> str:
    clients = summary.get("clients")
    if not clients:
        return ""
    kind = "streamed" if clients["streams"] else "complete answers"
    slo_s, share = clients["publish_slo_s"], clients["publish_slo_share"]
    within = "" if slo_s is None else f"; {percent_at_least(share)} within {slo_s:g} s"
    return (
        f"Time to publish ({kind}, {percent(clients['hidden_share'])} of the output tokens hidden): "
        f"{_mean_and_p99(summary['publish'])}{within}"
    )


def _reading(summary: dict[str, Any]) -> str:
    reading = (summary.get("clients") or {}).get("reading")
    if not reading:
        return ""
    share = percent_at_least(reading["never_slower_share"])
    return (
        f"Reading at {reading['tokens_per_s']:g} tokens/s: {share} of requests are never slower; "
        f"readers wait {_mean_and_p99(reading['stall'])}"
    )


def _tasks(summary: dict[str, Any]) -> str:
    tasks = summary.get("tasks")
    if not tasks or not tasks["count"]:
        return ""
    slo_s, share = tasks["slo_s"], tasks["slo_share"]
    within = "" if slo_s is None else f"; {percent_at_least(share)} within {slo_s:g} s"
    counts = f"{tasks['finished']:,} of {tasks['count']:,} finished, {tasks['calls_per_task']:.1f} calls each"
    latency, makespan = _mean_and_p99(tasks["latency"]), _time(tasks["makespan_s"])
    return f"Tasks: {counts}; latency {latency}{within}; makespan {makespan}"


def _mean_and_p99(latency: dict[str, Any]) -> str:
    return f"mean {_time(latency['mean_s'])}, p99 {_time(latency['p99_s'])}"


def _time(value_s: float | None) -> str:
    return "unknown" if value_s is None else f"{value_s:.2f} s" if value_s < 10 else seconds(value_s)


GIVEN_UP = {
    "no_room": "for lack of room",
    "preempted": "as the request was preempted",
    "ended": "as the request ended",
    "too_long": "after too many stages",
}
"""Texts of the outcomes of migrations without effect."""
MAX_PLACES = 8
"""Number of places whose rates are printed; the table of acceptance has all."""


def pressure_lines(summary: dict[str, Any]) -> list[str]:
    """Returns lines on cache, preemptions, waits, pipeline, transfers, migrations, speculation and traffic.

    The line on waiting appears only if causes other than the current iteration and the frontend exceed a
    tenth of the mean wait and 1 ms per request.
    """
    lines = (
        _cache(summary),
        _preemption(summary),
        _waiting(summary),
        _pipeline("Pipeline", summary.get("pipeline")),
        *(
            _pipeline(f"Pipeline of {name}", pool.get("pipeline"))
            for name, pool in summary.get("by_pool", {}).items()
        ),
        _kv_transfer(summary),
        migration_line(summary),
        *speculation_lines(summary),
        *traffic_lines(summary),
    )
    return [line for line in lines if line]


def _kv_transfer(summary: dict[str, Any]) -> str:
    use = summary.get("kv_transfer")
    if not use:
        return ""
    seconds, links = use["seconds"], use["links"]
    return (
        f"KV transfers: {use['requests']:,}, {use['bytes'] / 1e9:,.1f} GB in total; "
        f"mean {seconds['mean_s'] * 1e3:.3g} ms (p99 {seconds['p99_s'] * 1e3:.3g} ms), "
        f"{percent(use['share_of_e2e'])} of E2E; busiest link {percent(links['fullest_share'])}; "
        f"the {use['first_token_at']} replica sends the first token"
    )


def _pipeline(title: str, figures: dict[str, Any] | None) -> str:
    if not figures:
        return ""
    drafting = f", {percent(figures['drafting_share'])} drafting" if "drafting_share" in figures else ""
    return (
        f"{title}: {figures['stages']} stages, {figures['mean_micro_batches']:.1f} micro-batches in flight; "
        f"bubbles take {percent(figures['bubble_share'])} of the stages' time "
        f"({percent(figures['unequal_stages_share'])} unequal stages, "
        f"{percent(figures['few_micro_batches_share'])} too few micro-batches{drafting}); "
        f"{percent(figures['host_share'])} is spent waiting for the host"
    )


def migration_line(summary: dict[str, Any]) -> str:
    """Returns the line on live migrations; empty for a run without a migration policy."""
    use = summary.get("migrations")
    if not use:
        return ""
    given_up = ", ".join(f"{count:,} {GIVEN_UP[name]}" for name, count in use["given_up"].items() if count)
    text = f"Migrations: {use['count']:,}" + (f"; given up: {given_up}" if given_up else "")
    if not use["count"]:
        return text
    downtime, whole = use["downtime"], use["duration"]
    return (
        f"{text}; {use['bytes'] / 1e9:,.3g} GB of KV copied; mean downtime {downtime['mean_s'] * 1e3:.3g} ms "
        f"(p99 {downtime['p99_s'] * 1e3:.3g} ms), mean duration {whole['mean_s'] * 1e3:.3g} ms"
    )


def speculation_lines(summary: dict[str, Any]) -> list[str]:
    """Returns lines on acceptance and wasted work; none without speculation."""
    use = summary.get("speculation")
    if not use:
        return []
    if not use["drafts"]:
        return ["Speculation: nothing was drafted"]
    rates = [percent(place["rate"]) for place in use["by_place"][:MAX_PLACES]]
    more = ", ..." if len(use["by_place"]) > MAX_PLACES else ""
    wasted = use["wasted_tokens"]
    most = 1 + min(use["draft_tokens_per_draft"], len(use["by_place"]))  # of a tree, one path is accepted
    return [
        f"Speculation: mean accepted length {_length(use['mean_accepted_length'])} of "
        f"{_length(most)}, {_length(use['tokens_per_pass'])} tokens per pass; "
        f"{use['drafts']:,} drafts, acceptance rate {percent(use['acceptance_rate'])}, by place "
        f"{', '.join(rates)}{more}",
        f"Draft tokens: {use['draft_tokens']:,} verified, {use['kept_tokens']:,} kept; in vain "
        f"{wasted['rejected']:,} rejected, {wasted['discarded']:,} behind the end of an answer, "
        f"{wasted['unused']:,} unused, and {percent(use['flops']['wasted_share'])} of all FLOPs",
        "ITL is the gap between bursts, as the tokens of a pass come together: about TPOT times the tokens "
        "per pass.",
    ]


def _length(tokens: float | None) -> str:
    return MISSING if tokens is None else number(tokens)


def _cache(summary: dict[str, Any]) -> str:
    cache = summary.get("cache")
    if not cache:
        return ""
    parts = []
    again = cache["with_resumptions"]
    if cache["found_tokens"] or again["found_tokens"]:
        with_resumed = f", {percent(again['hit_share'])} including resumed requests"
        resumed = with_resumed if again["looked_up_tokens"] != cache["looked_up_tokens"] else ""
        parts.append(
            f"hit rate {percent(cache['hit_share'])} of {cache['looked_up_tokens']:,} prompt tokens{resumed}"
        )
    if cache["evicted_blocks"] and again["found_tokens"]:  # without hits, evictions have no effect
        trimmed = summary["trimmed"]
        when = " in the whole run" if trimmed["warmup_s"] or trimmed["cooldown_s"] else ""
        parts.append(f"{plural(cache['evicted_blocks'], 'block')} evicted{when}")
    for verb, way in (("loaded", "from"), ("stored", "to")):
        for tier, num_tokens in cache[f"{verb}_tokens"].items():
            if num_tokens:
                amount = amount_of_kv(num_tokens, cache[f"{verb}_bytes"][tier])
                parts.append(f"{amount} {verb} {way} {tier}")
    return f"Cache: {'; '.join(parts)}" if parts else ""


def _preemption(summary: dict[str, Any]) -> str:
    figures = summary.get("preemption")
    if not figures:
        return ""
    parts = []
    if figures["recompute"]:
        parts.append(f"{figures['recompute']:,} by recompute")
    if figures["swap"]:
        out, back = (
            amount_of_kv(figures[f"swapped_{way}_tokens"], figures[f"swapped_{way}_bytes"])
            for way in ("out", "in")
        )
        parts.append(f"{figures['swap']:,} by swap ({out} out, {back} in)")
    if parts:
        parts.append(f"{plural(figures['recomputed_tokens'], 'token')} recomputed")
    return f"Preemptions: {'; '.join(parts)}" if parts else ""


def _waiting(summary: dict[str, Any]) -> str:
    figures = summary.get("waiting")
    if not figures or not figures["mean_s"]:
        return ""
    by_cause_s = figures["by_cause_s"]
    least_s = max(1e-3, 0.1 * figures["mean_s"])
    if sum(by_cause_s.values()) - by_cause_s["frontend"] - by_cause_s["iteration"] < least_s:
        return ""
    causes = sorted(by_cause_s, key=lambda cause: -by_cause_s[cause])
    parts = [f"{WAITS[cause]} {milliseconds(by_cause_s[cause])}" for cause in causes if by_cause_s[cause] > 0]
    return f"Waiting, ms per request: {milliseconds(figures['mean_s'])}; {', '.join(parts)}"
