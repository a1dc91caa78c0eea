"""Readings of nvidia-smi and ncu, which scripts stand in for."""

# ruff: noqa: E402  what is imported below needs torch and triton

from __future__ import annotations

import os
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from experiments.gpu import counters
from experiments.gpu.engine_cases import _spread
from experiments.gpu.record import Record, UnavailableError
from experiments.gpu.sensors import in_words, readings, sampled
from experiments.gpu.speed_cases import targeted

NCU = """#!/usr/bin/env python3
import sys
log = sys.argv[sys.argv.index("--log-file") + 1]
metrics = sys.argv[sys.argv.index("--metrics") + 1].split(",")
columns = ["ID", "Kernel Name", *metrics]
rows = [["", "", *["%"] * len(metrics)], ["0", "first, of two", *["1,234.5"] * len(metrics)],
        ["1", "second", *["n/a"] * len(metrics)]]
with open(log, "w") as file:
    print("==PROF== Connected to process 1", file=file)
    for row in [columns, *rows]:
        print(",".join(f'"{cell}"' for cell in row), file=file)
"""


def install(monkeypatch, folder, name, text):
    """Puts a program of this name first on the path."""
    script = folder / name
    script.write_text(text)
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def make_record(folder):
    return Record(
        folder / "counters.json", "counters", torch.device("cpu"), quick=True, limit_s=1000.0, seed=0
    )


def test_sensors_are_read_until_the_part_ends(monkeypatch, tmp_path):
    lines = "1980, 3201, 500.5, 60\n1755, 3201, [N/A], 61\n1700, 32"
    install(monkeypatch, tmp_path, "nvidia-smi", f"#!/bin/sh\nprintf '{lines}'\nexec sleep 600\n")
    file = tmp_path / "limits.sensors.log"
    with sampled(file):
        while not file.exists() or file.read_text() != lines:
            time.sleep(0.01)
    found = readings(file)
    assert found["sm_clock_mhz"] == {"min": 1700, "median": 1755, "max": 1980}
    assert found["power_w"] == {"min": 500.5, "median": 500.5, "max": 500.5}
    assert found["temperature_c"]["max"] == 61
    assert in_words(found).startswith("clocks.sm 1755 MHz (1700 to 1980), clocks.mem")


def test_without_nvidia_smi_there_are_no_readings(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with sampled(tmp_path / "x.sensors.log"):
        pass
    assert readings(tmp_path / "x.sensors.log") == {}
    assert in_words({}) == ""


def test_counters_are_read_by_kernel(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path, "ncu", NCU)
    record = make_record(tmp_path)
    counters.run(record)
    assert [row["name"] for row in record.rows] == [case.name for case, _ in targeted(quick=True)]
    first, second = record.rows[0]["kernels"]
    assert first["kernel"] == "first, of two"
    assert first["dram_percent"] == 1234.5
    assert second == {"kernel": "second"}


def test_counters_that_cannot_be_read_say_why(monkeypatch, tmp_path):
    refusal = "==ERROR== ERR_NVGPUCTRPERM - no permission"
    script = f'#!/bin/sh\nwhile [ "$1" != --log-file ]; do shift; done\necho "{refusal}" >"$2"\n'
    install(monkeypatch, tmp_path, "ncu", script)
    with pytest.raises(UnavailableError, match="ERR_NVGPUCTRPERM"):
        counters._counted(make_record(tmp_path), "rope")


def test_every_counted_case_can_be_run_by_name():
    for case, _ in targeted(quick=True):
        assert counters.main(case.name) == 0


def test_lengths_are_spread_by_their_logarithms():
    assert _spread(3, 128, 8192) == [128, 1024, 8192]
