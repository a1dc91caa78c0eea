"""Limits the number of requests of a study's runs, unless the user has set the workload's number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from experiments.app.settings.override import Override

LIMITS = ("num_requests", "max_requests")
"""Keys of workloads that set the number of requests."""


def limit_key(workload: Mapping[str, Any]) -> str | None:
    """Returns the key that sets the number of a workload's requests; None if it has none."""
    return next((key for key in LIMITS if key in workload), None)


def limiting_override(config: Mapping[str, Any], overrides: Sequence[str], limit: int | None) -> str | None:
    """Returns the override that limits a composed config to `limit` requests; None if none is needed.

    overrides: those of the config. None is needed if one of them sets the number, if the workload has no such
    key, or if it has no more requests.
    """
    key = limit_key(config["workload"])
    if limit is None or key is None:
        return None
    if any(Override.parse(text).name == f"workload.{key}" for text in overrides):
        return None
    present = config["workload"][key]
    return f"workload.{key}={limit}" if present is None or present > limit else None
