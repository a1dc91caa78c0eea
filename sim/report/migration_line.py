"""The line of a report on live migrations."""

from __future__ import annotations

from typing import Any

GIVEN_UP = {
    "no_room": "for lack of room",
    "preempted": "as the request was preempted",
    "ended": "as the request ended",
    "too_long": "after too many stages",
}
"""Texts of the outcomes of migrations without effect."""


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
