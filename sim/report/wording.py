"""Texts and tables of a summary, shared by the terminal and the report."""

from __future__ import annotations

from typing import Any

from sim.metrics.slo import WORKLOAD_TERMS
from sim.report.migration_line import migration_line
from sim.report.numbers import (
    MISSING,
    amount_of_kv,
    dollars,
    grams,
    milliseconds,
    number,
    percent,
    percent_at_least,
    seconds,
)
from sim.report.speculation_lines import speculation_lines
from sim.report.traffic_lines import traffic_lines

LATENCIES = {
    "ttft": "TTFT",
    "tpot": "TPOT",
    "itl": "ITL",
    "e2e": "E2E",
    "queue": "queue",
    "publish": "time to publish",
    "task": "task latency",
}
WAITS = {
    "gateway": "no replica",
    "frontend": "frontend",
    "iteration": "current iteration",
    "slot": "no sequence slot",
    "budget": "no token budget",
    "memory": "no KV memory",
    "policy": "policy",
    "adapter": "no adapter slot",
    "load": "KV being loaded",
}
"""Cause of a wait -> its label."""
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
LEAST_BUSY, LOW_MFU = 0.5, 0.5
"""Least share of busy time, and largest ratio of MFU to it, for which the difference is explained."""
CLASS_LATENCIES = ("ttft", "tpot", "e2e")
"""Latencies in the tables of priorities and tenants."""


def verdict(summary: dict[str, Any]) -> str:
    """Returns one sentence: the share of requests that met the SLO; without an SLO, how many finished."""
    requests, goodput = summary["requests"], summary["goodput"]
    measured = requests["arrived"] - summary["trimmed"]["requests_left_out"]
    if measured == 0:
        return "No request arrived in the measurement window."
    if goodput is None:
        return f"{requests['finished']:,} of {requests['arrived']:,} requests finished; no SLO was given."
    name = " ".join(("SLO", goodput["slo"]["name"])).strip()
    return (
        f"{name} {'attained' if goodput['attained'] else 'missed'}: {percent_at_least(goodput['share'])} of "
        f"{measured:,} request{'s' * (measured != 1)} met it (target {100 * goodput['target']:g} %)"
    )


def caveats(summary: dict[str, Any]) -> list[str]:
    """Returns the sentences above the figures: trimming, early ends, rejected and unfinished requests."""
    trimmed, requests = summary["trimmed"], summary["requests"]
    found = []
    if summary["interrupted"]:
        found.append(
            f"Interrupted at {seconds(summary['simulated_s'])} of simulated time; "
            "the figures are of this part."
        )
    if trimmed["warmup_s"] or trimmed["cooldown_s"]:
        found.append(
            f"Measured from {seconds(trimmed['start_s'])} to {seconds(trimmed['end_s'])}; "
            f"{plural(trimmed['requests_left_out'], 'request')} outside this window "
            f"{'is' if trimmed['requests_left_out'] == 1 else 'are'} not counted."
        )
    if missed := summary.get("missed"):
        found.append(
            f"Stopped early at {seconds(missed['at_s'])}: {missed['missed']:,} requests had missed the SLO; "
            f"at most {missed['allowed']:,} of {missed['requests']:,} may. The figures are of this part."
        )
    for status in ("rejected", "aborted"):
        if requests[status]:
            verb = "was" if requests[status] == 1 else "were"
            found.append(f"{requests[status]:,} of {requests['arrived']:,} requests {verb} {status}.")
    if requests["unfinished"]:
        # A run ends before its last request for one of three reasons.
        is_cut = summary.get("missed") or summary.get("overload")
        end = "interruption" if summary["interrupted"] else "early end" if is_cut else "time limit"
        is_one = requests["unfinished"] == 1
        counts = f" and count{'s' * is_one} as missed" if summary["goodput"] else ""
        found.append(
            f"{requests['unfinished']:,} of {requests['arrived']:,} requests "
            f"{'was' if is_one else 'were'} still running or waiting at the {end}{counts}."
        )
    found += summary.get("notes", [])
    return found


def slo_terms(goodput: dict[str, Any]) -> list[str]:
    """Returns one text per limit of the SLO, with the share of the requests that met it."""
    return [
        f"{LATENCIES[term]} ≤ {goodput['slo'][f'{term}_ms']:g} ms: {percent_at_least(share)} of requests"
        for term, share in goodput["term_shares"].items()
    ]


def headline(summary: dict[str, Any]) -> dict[str, dict[str, str]]:
    """Returns the blocks of headline figures: title -> label -> value with its unit."""
    throughput, goodput, kv, cost = (summary[key] for key in ("throughput", "goodput", "kv", "cost"))
    iterations = summary["iterations"]
    return {
        "Throughput": {
            "output": f"{number(throughput['output_tokens_per_s'])} tok/s",
            "input": f"{number(throughput['input_tokens_per_s'])} tok/s",
            "requests": f"{number(throughput['requests_per_s'])} /s",
            "goodput": f"{number(goodput['requests_per_s'])} /s" if goodput else MISSING,
            "simulated": seconds(summary["simulated_s"]),
        },
        "Hardware": {
            "GPU busy": percent(summary["gpu_busy"]),
            "MFU / MBU": f"{percent(summary['mfu'])} / {percent(summary['mbu'])}",
            "KV mean / peak": f"{percent(kv['mean_use_share'])} / {percent(kv['peak_use_share'])}",
            "batch mean / max": f"{number(iterations['mean_batch_seqs'])} / {iterations['max_batch_seqs']:,}",
            "preemptions": f"{summary['preemptions']:,}",
        },
        "Cost": {
            "total": dollars(cost["usd"]),
            "per M output tokens": dollars(cost["usd_per_million_output_tokens"]),
            "split: per M input": dollars(cost["split"]["usd_per_million_input_tokens"]),
            "split: per M output": dollars(cost["split"]["usd_per_million_output_tokens"]),
            "per 1,000 requests": dollars(cost["usd_per_1000_requests"]),
        },
    }


def own_table(summary: dict[str, Any]) -> list[list[str]]:
    """Returns a heading and one row for each metric of the user's own; nothing without any."""
    own = summary.get("own", {})
    rows = [[name.replace("_", " "), _own_value(one["value"]), one["unit"]] for name, one in own.items()]
    return [["own metric", "value", "unit"], *rows] if rows else []


def _own_value(value: Any) -> str:
    if value is None:
        return MISSING
    return number(value) if isinstance(value, int | float) else str(value)


def energy(summary: dict[str, Any]) -> dict[str, str]:
    """Returns the energy figures: label -> value with its unit; empty if the summary has none."""
    figures = summary.get("energy")
    if figures is None:
        return {}
    return {
        "electricity": f"{number(figures['kwh'])} kWh",
        "emissions": f"{grams(figures['g_co2e'])} CO2e",
        "per output token": f"{number(figures['joules_per_output_token'])} J",
        "per 1,000 requests": f"{number(figures['kwh_per_1000_requests'])} kWh",
        "power per GPU": f"{number(figures['mean_device_w'])} W",
    }


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


def pool_table(summary: dict[str, Any]) -> list[list[str]]:
    """Returns a table (heading and rows) with one row per pool; empty if there is one pool only."""
    pools = summary.get("by_pool")
    if not pools:
        return []
    return [
        ["pool", "requests", "GPU busy", "MFU", "MBU", "GPU-hours", "cost"],
        *(
            [
                name,
                f"{figures['requests']:,}",
                *(percent(figures[use]) for use in ("gpu_busy", "mfu", "mbu")),
                number(figures["device_hours"]),
                dollars(figures["usd"]),
            ]
            for name, figures in pools.items()
        ),
    ]


def plural(count: int, one: str, many: str | None = None) -> str:
    """Returns a count with its noun: 1 request, 2 requests. many: an irregular plural."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


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


def busy_line(summary: dict[str, Any]) -> str:
    """Returns why MFU is low although the GPU is busy; empty if MFU is high or the GPU is idle."""
    busy, mfu, mbu = (summary[use] for use in ("gpu_busy", "mfu", "mbu"))
    if None in (busy, mfu, mbu) or not (busy >= LEAST_BUSY and mfu < LOW_MFU * busy):
        return ""
    why = (
        f"reads of weights and KV limit decode (MBU {percent(mbu)})"
        if mbu > mfu
        else f"launches, the host and communication leave units idle (MBU {percent(mbu)})"
    )
    return (
        f"High utilisation with low MFU is normal: iterations run {percent(busy)} of the time, but {why}, "
        f"so they use few of the peak FLOP/s (MFU {percent(mfu)})."
    )


def energy_line(summary: dict[str, Any]) -> str:
    """Returns the energy figures in one line; empty if the summary has none."""
    figures = energy(summary)
    if not figures:
        return ""
    return (
        f"Energy: {figures['electricity']}, {figures['emissions']}; {figures['per output token']} per output "
        f"token, {figures['per 1,000 requests']} per 1,000 requests; {figures['power per GPU']}/GPU"
    )


def latency_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Returns one row per latency: label, the `STATISTICS` in milliseconds, count."""
    return [
        [
            label,
            *(milliseconds(summary[name][f"{statistic}_s"]) for statistic in STATISTICS),
            f"{summary[name]['count']:,}",
        ]
        for name, label in LATENCIES.items()
        if name not in WORKLOAD_TERMS
    ]


def class_tables(summary: dict[str, Any]) -> list[list[list[str]]]:
    """Returns tables (heading and rows) by priority and by tenant; none if there is one class only."""
    tables = []
    for kind in ("priority", "tenant"):
        classes = summary.get(f"by_{kind}", {})
        if not classes:
            continue
        names = [f"{LATENCIES[name]} {q}" for name in CLASS_LATENCIES for q in ("p50", "p99")]
        tables.append([[f"{kind}, ms", *names, "SLO met", "finished", "arrived"]])
        for name, figures in classes.items():
            met = percent_at_least(figures["goodput"]["share"]) if figures["goodput"] else MISSING
            values = [
                milliseconds(figures[latency][f"{q}_s"])
                for latency in CLASS_LATENCIES
                for q in ("p50", "p99")
            ]
            counts = [f"{figures['requests'][status]:,}" for status in ("finished", "arrived")]
            tables[-1].append([name or "(none)", *values, met, *counts])
    return tables
