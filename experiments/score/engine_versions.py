"""Maps an engine's version in a table of measurements to the engine profile that holds for it.

A row without a version (runs of InferenceMAX in 2025), or with the name of a build (gpt-oss-dev), gets the
profile of the release that was current on the day of the measurement, or on the day in the build's name
(nightly-dev-20260216). Without a day it gets the profile with the engine's name, which is the newest. A
version of vLLM that is synchronous by default, but was started with async_scheduling, has its own profile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from experiments.app.launch_lines.flags import Engine
from experiments.app.launch_lines.versions import PROFILES, WITH_ASYNC_SCHEDULING, profile_at
from experiments.score.recipes import recipe_of

ENGINES: Mapping[str, Engine] = {"vllm": "vllm", "trtllm": "tensorrt_llm"}
"""Engines with versions, by their names in tables of measurements."""


def engine_of(row: dict[str, Any]) -> str:
    """Returns the engine profile of the row; engines without versions here have one profile."""
    engine, version = str(row["backend"]), row.get("backend_version")
    name = ENGINES.get(engine)
    if name is None:
        return engine
    found = re.match(r"\d+\.\d+", str(version))
    if found:
        profile = profile_at(name, found[0])
    else:
        day = measured_day(str(version), row.get("measured_date"))
        profile = [entry.profile for entry in PROFILES[name] if day is None or entry.day <= day][-1]
    if profile in WITH_ASYNC_SCHEDULING and recipe_of(row).asynchronous:
        return WITH_ASYNC_SCHEDULING[profile]
    return profile


def measured_day(version: str, measured: Any) -> str | None:
    """Returns the day in the name of a build, such as -20260216-, else the day of the measurement."""
    found = re.search(r"(?<!\d)(20\d\d)([01]\d)([0-3]\d)(?!\d)", version)
    if found:
        return "-".join(found.groups())
    return None if measured is None or pd.isna(measured) else str(measured)[:10]
