"""Maps an engine's version in a table of measurements to the engine profile that holds for it.

A row without a version (runs of InferenceMAX in 2025), or with the name of a build (gpt-oss-dev), gets the
profile of the release that was current on the day of the measurement, or on the day in the build's name
(nightly-dev-20260216). Without a day it gets the profile with the engine's name, which is the newest. A
version of vLLM that is synchronous by default, but was started with async_scheduling, has its own profile.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pandas as pd

from experiments.score.recipes import recipe_of


class Since(NamedTuple):
    """A profile that holds from a version on, and from the day when benchmarks began to use that version."""

    version: tuple[int, int]
    day: str
    profile: str


PROFILES = {
    "vllm": (
        Since((0, 0), "", "vllm_v0"),
        Since((0, 8), "2025-03-18", "vllm_sync"),
        Since((0, 14), "2026-02-01", "vllm"),
    ),
    "trtllm": (
        Since((0, 0), "", "tensorrt_llm_1_0"),
        Since((1, 1), "2025-09-15", "tensorrt_llm_1_1"),
        Since((1, 2), "2025-12-15", "tensorrt_llm"),
    ),
}
"""By engine, oldest first. Days: those on which InferenceMAX first ran an image of that version; that of vLLM
0.8, which made v1 the default, is its release."""


WITH_ASYNC_SCHEDULING = {"vllm_sync": "vllm_0_10_async"}
"""Profiles of synchronous versions, and the profile if the benchmark asked for asynchronous scheduling."""


def engine_of(row: dict[str, Any]) -> str:
    """Returns the engine profile of the row; engines without versions here have one profile."""
    engine, version = str(row["backend"]), row.get("backend_version")
    profiles = PROFILES.get(engine)
    if profiles is None:
        return engine
    found = re.match(r"(\d+)\.(\d+)", str(version))
    if found:
        number = int(found[1]), int(found[2])
        profile = [entry.profile for entry in profiles if entry.version <= number][-1]
    else:
        day = measured_day(str(version), row.get("measured_date"))
        profile = [entry.profile for entry in profiles if day is None or entry.day <= day][-1]
    if profile in WITH_ASYNC_SCHEDULING and recipe_of(row).asynchronous:
        return WITH_ASYNC_SCHEDULING[profile]
    return profile


def measured_day(version: str, measured: Any) -> str | None:
    """Returns the day in the name of a build, such as -20260216-, else the day of the measurement."""
    found = re.search(r"(?<!\d)(20\d\d)([01]\d)([0-3]\d)(?!\d)", version)
    if found:
        return "-".join(found.groups())
    return None if measured is None or pd.isna(measured) else str(measured)[:10]
