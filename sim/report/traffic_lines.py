"""The text on what clients and tasks of agents see, for the terminal and the report."""

from __future__ import annotations

from typing import Any

from sim.report.numbers import percent, percent_at_least, seconds


def traffic_lines(summary: dict[str, Any]) -> list[str]:
    """Returns lines on time to publish, reading and whole tasks; none if the workload does not know them.

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
