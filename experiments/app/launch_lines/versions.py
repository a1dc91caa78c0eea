"""The version of an engine that a command names by its container image or package, and its engine profile."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from experiments.app.launch_lines.flags import Engine


class Since(NamedTuple):
    """A profile that holds from a version on, and from the day when benchmarks began to use that version."""

    version: tuple[int, int]
    day: str
    profile: str


PROFILES: Mapping[Engine, Sequence[Since]] = {
    "vllm": (
        Since((0, 0), "", "vllm_v0"),
        Since((0, 8), "2025-03-18", "vllm_sync"),
        Since((0, 14), "2026-02-01", "vllm"),
    ),
    "tensorrt_llm": (
        Since((0, 0), "", "tensorrt_llm_1_0"),
        Since((1, 1), "2025-09-15", "tensorrt_llm_1_1"),
        Since((1, 2), "2025-12-15", "tensorrt_llm"),
    ),
}
"""By engine, oldest first. Days: those on which InferenceMAX first ran an image of that version; that of vLLM
0.8, which made v1 the default, is its release."""

WITH_ASYNC_SCHEDULING = {"vllm_sync": "vllm_0_10_async"}
"""Profiles of synchronous versions, and the profile if asynchronous scheduling is asked for."""

IMAGES: Mapping[Engine, re.Pattern[str]] = {
    "vllm": re.compile(r"(^|/)vllm(-openai|-cpu|-rocm)?[\w.-]*(:|@|$)|vllm/vllm-|/vllm[:/]"),
    "sglang": re.compile(r"lmsysorg/sglang|(^|/)sglang[\w.-]*(:|@|$)"),
    "tensorrt_llm": re.compile(r"tensorrt-llm/release|tensorrt_llm"),
}
"""Container images whose entry point, or whose arguments, start a server."""

TAGGED: Mapping[Engine, re.Pattern[str]] = {
    "vllm": re.compile(r"(?<![\w-])vllm/vllm-[\w-]+:"),
    "sglang": re.compile(r"(?<![\w-])lmsysorg/sglang:"),
    "tensorrt_llm": re.compile(r"tensorrt-llm/release:"),
}
"""Images whose tag is the engine's version; those of others count in their own way (`nvidia/vllm:25.09`)."""

PACKAGES: Mapping[Engine, str] = {"vllm": "vllm", "sglang": "sglang", "tensorrt_llm": "tensorrt[-_]llm"}
_VERSION = r"v?(?P<version>\d+\.\d+(?:\.\d+)?)"


def profile_at(engine: Engine, version: str) -> str:
    """Returns the profile of a version such as 0.10.2; an engine without versions here has one."""
    major, minor = version.split(".")[:2]
    number = int(major), int(minor)
    profiles = PROFILES.get(engine, (Since((0, 0), "", engine),))
    return [entry.profile for entry in profiles if entry.version <= number][-1]


def known(version: str) -> str:
    """Returns the nearest version of vLLM whose memory profile is known: none before 0.9.0 is."""
    return version if [int(part) for part in version.split(".")] >= [0, 9, 0] else "0.9.0"


def version_in(engine: Engine, texts: Iterable[str]) -> str | None:
    """Returns the version in an image's tag (`vllm/vllm-openai:v0.10.2`) or a package (`vllm==0.10.2`).

    It has three parts. None: no text names one, or several differ.
    """
    package = re.compile(rf"(?<![\w-]){PACKAGES[engine]}(\[[\w,-]+\])?(==|@){_VERSION}", re.I)
    tag = re.compile(TAGGED[engine].pattern + _VERSION)
    found = {match["version"] for text in texts for each in (package, tag) for match in each.finditer(text)}
    if len(found) != 1:
        return None
    (version,) = found
    return version if version.count(".") == 2 else f"{version}.0"
