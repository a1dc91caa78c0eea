"""Engine profiles by version, by day, and without either."""

import pytest

from experiments.app.launch_lines.versions import PROFILES
from experiments.app.settings.config_groups import CONFIG_DIR, find_groups
from experiments.score.engine_versions import engine_of


def profile(engine, version=None, day=None, source="nvidia-lab"):
    row = {
        "source": source,
        "model": "llama-3.1-70b",
        "gpu": "h200_sxm",
        "isl": 512,
        "osl": 512,
        "tp_size": 1,
    }
    return engine_of({**row, "backend": engine, "backend_version": version, "measured_date": day})


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("1.0.0rc3", "tensorrt_llm_1_0"),
        ("1.1.0rc2.post2", "tensorrt_llm_1_1"),
        ("1.2.0rc6.post1", "tensorrt_llm"),
        ("1.10.0", "tensorrt_llm"),
    ],
)
def test_a_version_gets_the_newest_profile_that_is_not_newer(version, expected):
    assert profile("trtllm", version) == expected


def test_without_a_version_the_day_of_the_measurement_decides():
    assert profile("trtllm", None, "2025-10-29") == "tensorrt_llm_1_1"
    assert profile("trtllm", "gpt-oss-dev", "2026-01-07") == "tensorrt_llm"
    assert profile("vllm", float("nan"), "2025-10-29") == "vllm_sync"


def test_the_profile_does_not_depend_on_columns_of_other_settings():
    """Rows of prefill and decode workers have no number of clients, from which a budget would follow."""
    row = {
        "source": "inferencemax",
        "backend": "trtllm",
        "model": "deepseek-r1",
        "measured_date": "2026-01-07",
    }
    assert engine_of({**row, "concurrency": float("nan")}) == "tensorrt_llm"


def test_vllm_before_0_8_is_v0():
    assert profile("vllm", "0.7.3") == profile("vllm", None, "2024-09-05") == "vllm_v0"
    assert profile("vllm", "0.8.0") == profile("vllm", None, "2025-03-19") == "vllm_sync"


def test_versions_that_were_told_to_schedule_asynchronously_have_their_own_profile():
    assert profile("vllm", None, "2025-10-29", source="inferencemax") == "vllm_0_10_async"
    assert profile("vllm", "0.15.1", source="inferencemax") == "vllm"


def test_the_day_in_a_builds_name_overrides_that_of_the_measurement():
    assert profile("vllm", "nightly-dev-20260216-d3bae71e", "2025-10-29") == "vllm"


def test_without_version_and_day_the_profile_has_the_engines_name():
    assert profile("trtllm") == "tensorrt_llm"
    assert profile("vllm") == "vllm"


def test_an_engine_without_versions_keeps_its_name():
    assert profile("sglang", "0.5.9") == "sglang"


def test_every_profile_exists_and_the_days_ascend():
    known = {choice.name for choice in find_groups([CONFIG_DIR])["engine"]}
    for entries in PROFILES.values():
        assert {entry.profile for entry in entries} <= known
        assert list(entries) == sorted(entries)
        assert [entry.day for entry in entries] == sorted(entry.day for entry in entries)
