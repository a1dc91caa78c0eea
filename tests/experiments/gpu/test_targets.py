"""The table of targets: the worst row counts, and each target belongs to a measurement."""

from __future__ import annotations

import json
import math
from fnmatch import fnmatchcase

import pytest

from experiments.gpu.steps import STEPS
from experiments.gpu.targets import TARGETS, Target, reached, table_of


def write(folder, step, *rows):
    (folder / f"{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


SHARE = Target("tokens", "engine_correct/*", "same_share", 1.0)
ERROR = Target("E2E", "validate/*", "e2e_mean_s", 0.05, at_most=True)


def test_the_worst_row_counts(tmp_path):
    write(
        tmp_path,
        "engine_correct",
        {"name": "a", "same_share": 1.0},
        {"name": "b", "same_share": 0.5},
        {"name": "c"},
    )
    write(tmp_path, "validate", {"name": "a", "e2e_mean_s": 0.02}, {"name": "b", "e2e_mean_s": 0.04})
    assert reached(SHARE, tmp_path) == 0.5
    assert not SHARE.is_met(0.5)
    assert reached(ERROR, tmp_path) == 0.04
    assert ERROR.is_met(0.04)


def test_a_row_with_an_error_fails_its_target_and_what_is_missing_was_not_measured(tmp_path):
    write(tmp_path, "engine_correct", {"name": "a", "same_share": 1.0}, {"name": "b", "error": "died"})
    write(tmp_path, "validate", {"name": "a", "late": "was being made"})
    assert math.isnan(reached(SHARE, tmp_path))
    assert reached(ERROR, tmp_path) is None


def test_the_table_has_a_line_for_every_target_and_a_column_for_every_folder(tmp_path):
    folder = tmp_path / "nvidia-h200" / "2026-11-29"
    folder.mkdir(parents=True)
    write(folder, "llama_8b", {"name": "idle_batch1", "gap_s": 4.2e-5}, {"name": "decode_batch1", "mbu": 0.7})
    lines = table_of([folder])
    assert len(lines) == 2 + len(TARGETS)
    assert lines[0] == "| what | target | nvidia-h200, 2026-11-29 |"
    assert "| GPU idle time between decode steps | at most 100 us | 42 us, met |" in lines
    assert any("decode at batch 1:" in line and "| 70.0 %, missed |" in line for line in lines)
    assert all(line.endswith("| not measured |") for line in table_of([])[2:])


def test_every_target_belongs_to_a_measurement(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from experiments.gpu.measurement import Run  # noqa: PLC0415  it imports torch

    run = Run(tmp_path, "cpu", rehearse=False, seed=0, left_s=1.0)
    for target in TARGETS:
        step, _, name = target.measurement.partition("/")
        if step != "validate":  # its table is made from the results of calibrate
            names = [one.name for one in STEPS[step].table()(run)]
            assert len(names) == len(set(names))
            assert any(fnmatchcase(each, name) for each in names), target.measurement
