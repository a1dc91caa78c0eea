"""Lines of text on the fleet of a run: failures of replicas, retries of clients, and scaling."""

from __future__ import annotations

from typing import Any

from sim.report.numbers import number, percent, seconds
from sim.report.wording import plural


def fleet_lines(summary: dict[str, Any]) -> list[str]:
    """Returns lines on failures, retries and scaling, where there are any."""
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
