"""Shorter runs: no more requests than a study asks for, where the workload's own number was not set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sim.settings.override import Override

LIMITS = ("num_requests", "max_requests")
"""Keys of workloads that say how many requests there are."""


def limit_key(workload: Mapping[str, Any]) -> str | None:
    """The key of a workload's node that says how many requests there are; None: always all."""
    return next((key for key in LIMITS if key in workload), None)


def limiting_override(config: Mapping[str, Any], overrides: Sequence[str], limit: int | None) -> str | None:
    """The override that leaves the first `limit` requests of a composed config; None if none is needed.

    overrides: those of the config. None is needed where one of them sets the number, where the workload has
    no such key, and where it has no more requests than that.
    """
    key = limit_key(config["workload"])
    if limit is None or key is None:
        return None
    if any(Override.parse(text).name == f"workload.{key}" for text in overrides):
        return None
    present = config["workload"][key]
    return f"workload.{key}={limit}" if present is None or present > limit else None
