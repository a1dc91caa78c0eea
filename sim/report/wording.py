"""Texts and tables of a summary, also by the definitions of other tools, for the terminal and the report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sim.metrics.dialects import DIALECTS, PERCENTILES, ours
from sim.metrics.slo import WORKLOAD_TERMS
from sim.report.numbers import (
    MISSING,
    count,
    dollars,
    grams,
    milliseconds,
    number,
    percent,
    percent_at_least,
    seconds,
)

if TYPE_CHECKING:
    import pandas as pd


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
"""Minimum busy share, and maximum ratio of MFU to it, for which the difference is explained."""
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
    """Returns the sentences above the metrics: trimming, early ends, rejected and unfinished requests."""
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
    """Returns the blocks of headline metrics: title -> label -> value with its unit."""
    throughput, goodput, kv, cost = (summary[key] for key in ("throughput", "goodput", "kv", "cost"))
    batch = summary["iterations"]
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
            "batch mean / max": f"{number(batch['mean_batch_seqs'])} / {count(batch['max_batch_seqs'])}",
            "preemptions": count(summary["preemptions"]),
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
    """Returns a heading and one row per user-defined metric; empty if there are none."""
    own = summary.get("own", {})
    rows = [[name.replace("_", " "), _own_value(one["value"]), one["unit"]] for name, one in own.items()]
    return [["own metric", "value", "unit"], *rows] if rows else []


def _own_value(value: Any) -> str:
    if value is None:
        return MISSING
    return number(value) if isinstance(value, int | float) else str(value)


def energy(summary: dict[str, Any]) -> dict[str, str]:
    """Returns the energy metrics: label -> value with its unit; empty if the summary has none."""
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


def pool_table(summary: dict[str, Any]) -> list[list[str]]:
    """Returns a table (heading and rows) with one row per pool; empty for a single pool."""
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
    """Returns the energy metrics in one line; empty if the summary has none."""
    figures = energy(summary)
    if not figures:
        return ""
    return (
        f"Energy: {figures['electricity']}, {figures['emissions']}; {figures['per output token']} per output "
        f"token, {figures['per 1,000 requests']} per 1,000 requests; {figures['power per GPU']}/GPU"
    )


def bill_line(summary: dict[str, Any]) -> str:
    """Returns the bill of an API for this traffic, and the break-even; empty without a tariff."""
    bill, load = summary.get("bill_usd"), summary.get("break_even_load")
    if bill is None or load is None:
        return ""
    return (
        f"API at this tariff: ${bill:,.4g} for the same traffic, the fleet ${summary['cost']['usd']:,.4g}; "
        f"this fleet costs less from {load:.3g} times the traffic on, as far as it can serve it"
    )


def training_line(summary: dict[str, Any]) -> str:
    """Returns the amount of serving with the FLOPs of training; empty without `energy.training_tokens`."""
    figures = summary.get("training")
    if figures is None:
        return ""
    return (
        f"Training on {figures['training_tokens']:,.4g} tokens took {figures['training_flops']:,.3g} FLOPs; "
        f"serving takes as many for {figures['output_tokens_of_equal_flops']:,.4g} output tokens of such "
        "traffic"
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
    """Returns tables (heading and rows) per priority and per tenant; none for a single class."""
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


DIALECT_LATENCIES = {
    "ttft": "time to first token",
    "per_token": "per token after the first",
    "per_token_with_first": "per token with the first",
    "gap": "gap between tokens",
    "e2e": "whole request",
}
FIGURES = {
    "answered": "successful",
    "failed": "failed",
    "duration_s": "duration, s",
    "requests_per_s": "requests/s",
    "output_tokens_per_s": "output tok/s",
    "goodput_per_s": "goodput/s",
    "good_share": "SLO attainment",
    "valid": "valid",
}
DIALECT_STATISTICS = ("mean", *(f"p{q}" for q in PERCENTILES))


def dialect_tables(summary: Mapping[str, Any]) -> list[list[list[str]]]:
    """Returns tables (heading and rows): one tool with its own terms, or several tools side by side.

    Empty if no other tool was selected.
    """
    found = summary.get("dialects")
    if not found:
        return []
    if len(found) == 1:
        return own_words(next(iter(found.values())))
    return [side_by_side(summary)]


def dialect_frame(summary: Mapping[str, Any]) -> pd.DataFrame:
    """Returns one row per metric and tool that reports it, ours first; columns name, value, mean_s, ...

    Index: the keys of `FIGURES` and `DIALECT_LATENCIES`; `ours` and the tools of the summary.
    """
    import pandas as pd  # noqa: PLC0415 (a run that shows no frame need not load it)

    dialects = {"ours": ours(summary).to_json(), **summary["dialects"]}
    rows = {
        (key, dialect): found[key]
        for key in (*FIGURES, *DIALECT_LATENCIES)
        for dialect, found in dialects.items()
        if key in found
    }
    columns = ["name", "value", *(f"{name}_s" for name in DIALECT_STATISTICS)]
    index = pd.MultiIndex.from_tuples(rows, names=["figure", "dialect"])
    return pd.DataFrame(list(rows.values()), index=index, columns=columns)


def own_words(dialect: Mapping[str, Any]) -> list[list[list[str]]]:
    """Returns two tables with the terms of one tool: its latencies and its metrics of the whole run."""
    latencies = [
        [dialect[key]["name"], *(milliseconds(dialect[key][f"{name}_s"]) for name in DIALECT_STATISTICS)]
        for key in DIALECT_LATENCIES
        if key in dialect
    ]
    figures = [
        [dialect[key]["name"], _value(key, dialect[key]["value"])] for key in FIGURES if key in dialect
    ]
    return [[[f"{dialect['tool']}, ms", *DIALECT_STATISTICS], *latencies], [[dialect["tool"], ""], *figures]]


def side_by_side(summary: Mapping[str, Any]) -> list[list[str]]:
    """Returns one table with a row per metric and a column per tool, ours first.

    A row above each latency has the terms of the tools.
    """
    columns = [
        ours(summary).to_json(),
        *(summary["dialects"][name] for name in DIALECTS if name in summary["dialects"]),
    ]
    rows = [["", *(column["tool"] for column in columns)]]
    for key in ("answered", "failed"):
        rows.append([FIGURES[key], *_figures(columns, key)])
    for key, label in DIALECT_LATENCIES.items():
        rows.append([label, *(column[key]["name"] if key in column else MISSING for column in columns)])
        for name in DIALECT_STATISTICS:
            cells = (
                milliseconds(_known(column[key][f"{name}_s"])) if key in column else "" for column in columns
            )
            rows.append([f"  {name}, ms", *cells])
    for key in list(FIGURES)[2:]:
        if any(key in column for column in columns):
            rows.append([FIGURES[key], *_figures(columns, key)])
    return rows


def _figures(columns: list[dict[str, Any]], key: str) -> list[str]:
    return [_value(key, column[key]["value"]) if key in column else MISSING for column in columns]


def _value(key: str, value: float | None) -> str:
    value = _known(value)
    if value is None:
        return MISSING
    if key == "valid":
        return "yes" if value else "no"
    if key == "good_share":
        return percent_at_least(value)
    return f"{value:,.0f}" if key in ("answered", "failed") else number(value)


def _known(value: float | None) -> float | None:
    """Returns None for NaN."""
    return None if value is None or value != value else value
