"""Lines of text on caches, preemptions, waits, pipelines, transfers, migrations and speculation in a run."""

from __future__ import annotations

from typing import Any

from sim.report.numbers import MISSING, amount_of_kv, milliseconds, number, percent
from sim.report.traffic_lines import traffic_lines
from sim.report.wording import WAITS, plural

GIVEN_UP = {
    "no_room": "for lack of room",
    "preempted": "as the request was preempted",
    "ended": "as the request ended",
    "too_long": "after too many stages",
}
"""Texts of the outcomes of migrations without effect."""
MAX_PLACES = 8
"""Places of which the rates are printed; the table of acceptance has all."""


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
    """Returns lines on acceptance and on what was in vain; none without speculation."""
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
