"""The GPU programme: a crash or a hang costs one measurement, and the results fit what comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from experiments import gpu_run
from experiments.gpu.steps import STEPS, in_order, limit_s
from experiments.gpu.targets import rows_of
from tests.drawn import drawn_of

ROOT = Path(__file__).resolve().parents[3]

STEP = """
import os, signal, subprocess, sys, time
from pathlib import Path
import torch
from experiments.gpu.measurement import Measurement, Recorder, Run

folder, how = Path(sys.argv[1]), sys.argv[2]
if how == "import":
    raise ImportError("no such module")
run = Run(folder, "cpu", rehearse=False, seed=0, left_s=float(sys.stdin.readline()))

def deadly(run, _):
    if how in ("hang", "late"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / "child").write_text(str(child.pid))
        time.sleep(600)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "poison":
        os._exit(70)
    raise ValueError("wrong")

fine = lambda run, _: {"x": 1}
limit_s = 0.5 if how == "hang" else 60.0
rows = [Measurement("first", fine), Measurement("deadly", deadly, limit_s=limit_s), Measurement("last", fine)]
Recorder(run, folder / "limits.jsonl").record(rows)
sys.exit(1)
"""


def run_script(monkeypatch, folder, how, share_s=60.0):
    """Runs STEP as the program runs a step; returns the step's status and its rows by name."""
    (folder / "step.py").write_text(STEP)

    def started(call, name, *, fresh=True):
        with (folder / "limits.log").open("a") as log:
            return subprocess.Popen(
                [sys.executable, str(folder / "step.py"), str(folder), how],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                text=True,
                start_new_session=True,
            )

    monkeypatch.setattr(gpu_run, "_started", started)
    call = gpu_run.Call(folder, "cpu", rehearse=False, seed=0, only={})
    done = gpu_run.run_step(call, "limits", share_s, started(call, "limits"))
    return done, {row["name"]: row for row in rows_of(folder / "limits.jsonl")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("crash", "exit status -11"),
        ("poison", "exit status 70"),
        ("raise", "ValueError: wrong"),
        ("hang", "had not ended at its own limit"),
    ],
)
def test_a_measurement_that_kills_its_process_leaves_the_others(monkeypatch, tmp_path, how, said):
    pytest.importorskip("torch")
    done, rows = run_script(monkeypatch, tmp_path, how)
    assert list(rows) == ["first", "deadly", "last"]
    assert said in rows["deadly"]["error"]
    assert rows["last"]["x"] == 1
    assert done["status"] == "failed"


@pytest.mark.slow
def test_at_the_end_of_its_share_a_step_is_ended_with_its_children_and_keeps_its_rows(monkeypatch, tmp_path):
    pytest.importorskip("torch")
    done, rows = run_script(monkeypatch, tmp_path, "late", share_s=40.0)
    assert done["status"] == "out of time"
    assert rows["first"]["x"] == 1
    assert "error" not in rows["deadly"]  # it was not wrong, there was no time
    assert rows["deadly"]["late"] == "was being made"
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        if not is_running(child):
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} is still there")


def is_running(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.slow
def test_a_step_that_does_not_begin_shows_why(monkeypatch, tmp_path):
    done, rows = run_script(monkeypatch, tmp_path, "import")
    assert done["status"] == "died"
    assert any("ImportError: no such module" in line for line in done["log"])
    assert rows == {}


def test_the_main_run_has_the_steps_in_the_order_of_their_value():
    names = [
        "limits",
        "smoke",
        "kernels_correct",
        "engine_correct",
        "llama_8b",
        "calibrate",
        "validate",
        "peers",
    ]
    assert in_order([]) == names
    assert in_order(["validate"]) == ["calibrate", "validate"]
    assert in_order(["validate"], done=["calibrate"]) == ["validate"]
    assert in_order(["tiles", "kernels_speed"]) == ["limits", "tiles", "kernels_speed"]


@pytest.mark.parametrize("total_s", [480.0, 180.0])
def test_all_steps_fit_if_each_takes_all_of_its_share(total_s):
    names, left_s = in_order([]), total_s - gpu_run.RESERVE_S
    for place, name in enumerate(names):
        share_s = limit_s(name, names[place + 1 :], left_s)
        assert gpu_run.LEAST_S <= share_s <= STEPS[name].share_s
        left_s -= share_s
    assert left_s == pytest.approx(0.0, abs=1e-6)


def test_the_rest_of_a_step_that_ends_early_goes_to_the_later_ones():
    names = in_order([])
    before = limit_s(names[1], names[2:], 450.0)
    assert limit_s(names[1], names[2:], 470.0) == pytest.approx(before * 470 / 450)
    assert limit_s(names[-1], [], 90.0) == 90.0


@pytest.fixture
def results(tmp_path):
    """Makes a folder of results, with more bytes than come back."""
    folder = tmp_path / "results" / "nvidia-h200" / "2026-11-29"
    (folder / "validated" / "load" / "load_60").mkdir(parents=True)
    (folder / "limits.jsonl").write_text('{"name": "rates", "read": 4e12}\n{"name": "torn')
    (folder / "run.jsonl").write_text('{"step": "limits", "rehearse": false}\n')
    (folder / "llama_8b.jsonl").write_text(
        '{"name": "decode_batch1", "mbu": 0.8}\n{"name": "decode_batch64", "error": "RuntimeError: no"}\n'
    )
    (folder / "validated" / "load" / "load_60" / "steps.parquet").write_bytes(os.urandom(17 << 20))
    (folder / "limits.now").write_text("{}")
    return folder


def test_what_comes_back_is_few_small_files_near_the_top(monkeypatch, tmp_path, results):
    out = tmp_path / "out"
    monkeypatch.setenv("OUT", str(out))
    gpu_run.archive(results)
    files = [file for file in out.rglob("*") if file.is_file()]
    assert sorted(file.name for file in files) == ["gpu_run.tar.gz", "table.txt"]
    assert all(file.parent == out and file.stat().st_size <= 16 << 20 for file in files)
    with tarfile.open(out / "gpu_run.tar.gz") as tar:
        names = tar.getnames()
    assert "nvidia-h200/2026-11-29/limits.jsonl" in names
    assert not any(name.endswith((".now", ".parquet")) for name in names)
    assert (results / "left_out.txt").read_text() == "validated/load/load_60/steps.parquet\n"
    table = (out / "table.txt").read_text()
    assert (
        "| Llama-3.1-8B, decode at batch 1: share of the read bandwidth | at least 75.0 % | 80.0 %, met |"
        in table
    )
    assert "FAILED decode_batch64: RuntimeError: no" in table


def test_without_out_nothing_is_archived(monkeypatch, tmp_path, results):
    monkeypatch.delenv("OUT", raising=False)
    monkeypatch.chdir(tmp_path)
    gpu_run.archive(results)
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def run_program(*arguments, limit_s=280, **variables):
    command = [sys.executable, "-m", "experiments.gpu_run", *arguments]
    env = os.environ | variables
    return subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=limit_s, check=False
    )


def test_what_cannot_run_is_refused_with_what_can(tmp_path):
    for arguments, said in (
        (["--only", "nothing"], "there is no step 'nothing'; the steps are limits"),
        (["--limit-s", "3"], "must be more than 4 s"),
        (["everything"], "invalid choice: 'everything'"),
    ):
        done = run_program(*arguments, "--results", str(tmp_path))
        assert done.returncode == 2
        assert said in done.stderr
    assert "kernels_speed" in run_program("--list").stdout
    assert "not measured" in run_program("table", "--results", str(tmp_path)).stdout


def test_without_a_gpu_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))  # no nvidia-smi
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: (_ for _ in ()).throw(subprocess.SubprocessError))
    assert gpu_run.main(["main", "--results", str(tmp_path)]) == 2


@pytest.mark.slow
def test_a_rehearsed_step_writes_its_lines_and_the_table_comes_last(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    arguments = (
        "--only",
        "limits",
        "kernels_correct/norm",
        "--rehearse",
        "--results",
        str(tmp_path),
        "--seed",
        "3",
    )
    done = run_program(*arguments, OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "cpu").iterdir()
    rows = {row["name"]: row for row in rows_of(folder / "limits.jsonl")}
    assert {"rates", "machine", "launch", "gemm_int8"} <= set(rows)
    assert rows["rates"]["read"] > 0
    checks = rows_of(folder / "kernels_correct.jsonl")
    assert [row["name"] for row in checks] == ["norm/bfloat16", "norm/float16"]
    assert all(row["ok"] for row in checks)
    ran = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    assert [(one["step"], one["status"], one["seed"]) for one in ran] == [
        ("limits", "passed", 3),
        ("kernels_correct", "passed", 3),
    ]
    assert done.stdout.splitlines()[-1] == f"results: {folder}"
    assert not list(folder.glob("*.tmp"))
    assert (tmp_path / "out" / "gpu_run.tar.gz").exists()


@pytest.mark.slow
def test_every_step_has_a_rehearsal(tmp_path):
    """All thirteen take four minutes on a quiet machine; the limit is that of a busy one."""
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    names = drawn_of(list(STEPS), 1, "rehearsals")
    long = ("--limit-s", "6000")
    done = run_program("--only", *names, "--rehearse", "--results", str(tmp_path), *long, limit_s=6600)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "cpu").iterdir()
    assert {file.stem for file in folder.glob("*.jsonl")} >= set(names)
    late = [row for name in names for row in rows_of(folder / f"{name}.jsonl") if "late" in row]
    assert late == []
