"""`windtunnel validate device=cpu` from the measurement to the report: the two-minute version.

All decisions must be equal. Times may be off by a factor of two: the machine is shared.
"""

from __future__ import annotations

import json
import math
import re

import pandas as pd
import pytest

from experiments.app.cli import main
from experiments.calibrate.engine import pace
from experiments.calibrate.engine import settings as measure_settings
from experiments.validate.engine.recording import load

MEASURED = {"max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 128}
TRAFFIC = (
    "workload.num_requests=16",
    "workload.lengths.prompt_tokens.mean=40",
    "workload.lengths.output_tokens.mean=10",
)
CASES = """\
_target_: experiments.validate.fidelity.settings.Suite
base: [load=0.9]
cases:
  static: [batching=static, batching.batch_size=3]
  mlfq: [scheduling=mlfq, scheduling.quantum_tokens=4, engine.max_num_seqs=2]
  swap:
    - caching=paged
    - scheduling.preemption_mode=swap
    - engine.num_kv_blocks=9
    - workload.lengths.prompt_tokens.mean=16
    - workload.lengths.output_tokens.mean=40
    - load=3
"""
ALL_AT_ONCE = "  all_at_once: [workload/arrivals=all_at_once]\n"

pytestmark = pytest.mark.xdist_group("device")  # the machine is measured once


@pytest.fixture(autouse=True, scope="module")
def _any_pace():
    """Accepts every pace: the machine that runs the tests may be busy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pace, "MOST_VARIATION", math.inf)
        patch.setattr(pace, "LEAST_CORE_SHARE", 0.0)
        yield


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """Calibrates this machine within seconds, and returns the folder of its configs."""
    folder = tmp_path_factory.mktemp("calibrated")
    measured = [f"measure.{name}={value}" for name, value in MEASURED.items()]
    arguments = ["model=random_8m", f"out={folder}", "measure.budget_s=8", "measure.iterations=8"]
    assert main(["calibrate", "device=cpu", *measured, *arguments]) == 0
    return folder


def validate(folder, *arguments, traffic=TRAFFIC):
    given = ["output.progress=false", f"hydra.run.dir={folder}", "overwrite=true"]
    return main(["validate", "device=cpu", *traffic, *given, *arguments])


def read(file):
    return json.loads(file.read_text())


def all_decisions_are_equal(sentence):
    """Tests whether replay and simulator both agree with the engine in every decision."""
    pairs = re.findall(r"([\d,]+) of ([\d,]+)", sentence)
    return len(pairs) == 2 and all(equal == num for equal, num in pairs) and "difference" not in sentence


@pytest.mark.slow
def test_one_case_is_run_twice_simulated_and_decomposed(calibrated, tmp_path, capsys):
    assert validate(tmp_path, f"calibrated={calibrated}", "load=0.4", "repeats=2") == 0
    said, record = capsys.readouterr().out, read(tmp_path / "validation.json")
    assert all_decisions_are_equal(said.splitlines()[0])
    assert {file.name for file in tmp_path.iterdir()} == {
        *("config.yaml", "validation.json", "report.html", "recordings"),
        *("simulated_requests.parquet", "simulated_iterations.parquet"),
        *(f"measured_{what}_{i}.parquet" for what in ("requests", "iterations") for i in (0, 1)),
    }
    assert record["config"]["hardware"]["name"] == "cpu"
    assert record["config"]["model"]["dtype"] == "fp32"
    assert record["environment"]["measured"]["packages"]["torch"]
    errors = {one["name"]: one for one in record["metrics"]}
    for name in ("ttft_mean_s", "tpot_mean_s", "itl_mean_s", "e2e_mean_s", "output_tokens_per_s"):
        assert 0.5 < errors[name]["simulated"] / errors[name]["real"] < 2
        assert errors[name]["noise"] >= 0
    assert errors["iteration_median"]["error"] < 0.5
    parts = {part["name"]: part["errors"] for part in record["decomposition"]}
    assert list(parts) == ["decisions", "queueing", "compute", "host", "clients"]
    for metric in ("ttft", "tpot", "e2e"):
        label, whole = f"{metric.upper()} mean", errors[f"{metric}_mean_s"]["error"]
        assert parts["decisions"][label] == pytest.approx(0, abs=1e-3)
        assert sum(errors[label] for errors in parts.values()) == pytest.approx(whole, abs=1e-9)
    page = (tmp_path / "report.html").read_text()
    for heading in (
        *("Verdict", "Errors", "Where the error comes from", "Distributions", "Over time"),
        *("Iteration times", "The first 200 iterations", "Environment", "Configuration"),
    ):
        assert f"{heading}</h2>" in page


@pytest.mark.slow
def test_memory_without_room_for_the_draft_s_kv_is_one_sentence(calibrated, tmp_path, capsys):
    draft = ["speculation=draft_model", "model@speculation.draft.model=random_8m"]
    blocks = "engine.num_kv_blocks=1000000000000"
    assert validate(tmp_path, f"calibrated={calibrated}", *draft, blocks) == 2
    error = capsys.readouterr().err
    assert "num_kv_blocks=1000000000000: the CPU has no memory for" in error
    assert "beside the weights of the model and of its draft" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_a_recording_can_be_validated_without_a_new_run(calibrated, tmp_path, capsys):
    assert validate(tmp_path, f"calibrated={calibrated}", "repeats=1", "output.report=false") == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert all_decisions_are_equal(first)
    again = ["validate", "--config-dir", str(calibrated), f"against={tmp_path / 'recordings' / '0'}"]
    machine = ["hardware=cpu", "engine=cpu", "latency=cpu_random_8m", "model=random_8m", "model.dtype=fp32"]
    arguments = [f"hydra.run.dir={tmp_path / 'again'}", "output.progress=false", "output.report=false"]
    assert main([*again, *machine, *arguments]) == 0
    assert capsys.readouterr().out.splitlines()[0] == first
    first, replayed = (read(folder / "validation.json") for folder in (tmp_path, tmp_path / "again"))
    real = [{one["name"]: one["real"] for one in record["metrics"]} for record in (first, replayed)]
    assert real[0] == real[1]


@pytest.mark.slow
def test_a_suite_of_three_policies_is_decided_alike_and_what_fails_does_not_stop_the_others(
    calibrated, tmp_path, capsys
):
    (tmp_path / "suite").mkdir()
    (tmp_path / "suite" / "three.yaml").write_text(CASES + ALL_AT_ONCE)
    folder = tmp_path / "out"
    own = ("--config-dir", str(tmp_path), "suite=three")
    assert validate(folder, f"calibrated={calibrated}", "repeats=1", *own) == 2
    printed = capsys.readouterr()
    message = "windtunnel: case all_at_once: load=0.9: the workload's requests arrive all at once"
    assert printed.err.startswith(message)
    assert printed.err.count("\n") == 1
    names = ["static", "mlfq", "swap"]
    assert {file.name for file in folder.iterdir()} == {"config.yaml", "suite.json", "suite.html", *names}
    record = read(folder / "suite.json")
    assert list(record) == names
    for name, case in record.items():
        assert case["plans_equal"] == case["plans"] > 20
        assert list(case["decomposition"]) == ["decisions", "queueing", "compute", "host", "clients"]
        assert {one["name"] for one in case["metrics"]} >= {"ttft_mean_s", "tpot_p99_s", "iteration_median"}
        assert all_decisions_are_equal(read(folder / name / "validation.json")["decision_equivalence"])
        assert (folder / name / "report.html").exists()
        assert re.search(rf"{name} +100 %", printed.out)
    page = (folder / "suite.html").read_text()
    for text in ("Errors of all figures", "Where the error comes from", "href='swap/report.html'"):
        assert text in page
    assert "all_at_once" not in page
    swap = load(folder / "swap" / "recordings" / "0")
    assert swap.steps["preempted"].sum() > 0
    assert swap.engine["num_kv_blocks"] == 9
    assert load(folder / "mlfq" / "recordings" / "0").steps["running"].max() == 2


@pytest.mark.slow
def test_without_a_calibration_the_machine_is_measured_first(tmp_path, monkeypatch, capsys):
    limits = {"max_num_seqs": 2, "max_model_len": 64, "max_num_batched_tokens": 64, "budget_s": 0.1}
    monkeypatch.setitem(measure_settings.LIMITS, "cpu", limits)
    few = ("workload.num_requests=6", "repeats=1", "output.report=false", "output.tables=false")
    assert validate(tmp_path, *few) == 0
    assert all_decisions_are_equal(capsys.readouterr().out.splitlines()[0])
    assert {file.name for file in tmp_path.iterdir()} == {
        *("config.yaml", "validation.json", "recordings", "calibrated"),
    }
    table = pd.read_parquet(tmp_path / "calibrated" / "profiles" / "cpu_random_8m.parquet")
    assert set(table["model"]) == {"random-8m"}
    assert read(tmp_path / "validation.json")["config"]["engine"]["max_num_seqs"] == 2


@pytest.mark.slow
def test_a_calibration_of_another_model_is_refused_with_what_to_do(calibrated, tmp_path, capsys):
    assert validate(tmp_path, f"calibrated={calibrated}", "model=smollm2_135m") == 2
    error = capsys.readouterr().err
    assert f"calibrated={calibrated}: latency/cpu_smollm2_135m.yaml is missing" in error
    assert f"windtunnel calibrate device=cpu model=... out={calibrated}" in error


@pytest.mark.slow
def test_every_policy_that_the_engine_runs_is_decided_alike(calibrated, tmp_path, capsys):
    """The whole of configs/suite/policies.yaml, with fewer requests; no time is looked at."""
    arguments = ("suite=policies", "repeats=1", "output.report=false", "output.tables=false")
    size = ("engine.max_num_seqs=32", "engine.max_model_len=1024", "workload.num_requests=30")
    assert validate(tmp_path, f"calibrated={calibrated}", *arguments, traffic=size) == 0
    record = read(tmp_path / "suite.json")
    assert len(record) > 30
    for name, case in record.items():
        assert case["plans_equal"] == case["plans"] > 20, name
        equivalence = read(tmp_path / name / "validation.json")["decision_equivalence"]
        assert all_decisions_are_equal(equivalence), f"{name}: {equivalence}"
    for name in ("recompute", "swap", "tiered", "inflight_max_utilization"):
        assert load(tmp_path / name / "recordings" / "0").steps["preempted"].sum() > 0, name


@pytest.mark.slow
def test_a_calibration_of_other_numbers_is_refused(calibrated, tmp_path, capsys):
    assert validate(tmp_path, f"calibrated={calibrated}", "model.weights=int8_wo") == 2
    assert "was measured with weights=None, not int8_wo; measure again" in capsys.readouterr().err
    assert validate(tmp_path, f"calibrated={calibrated}", "caching.block_size=32") == 2
    assert "was measured with block_size=16, not 32" in capsys.readouterr().err


def test_what_the_engine_will_not_serve_is_refused_before_anything_is_measured(tmp_path, capsys):
    assert validate(tmp_path, "prediction=oracle") == 2
    assert "prediction=OracleWithNoise: uses the true output lengths" in capsys.readouterr().err
    assert not (tmp_path / "calibrated").exists()
