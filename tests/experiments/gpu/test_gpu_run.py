"""Dry runs of the GPU measurements: a part that crashes or hangs leaves the others, and its own rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytest.importorskip("triton")

import torch

from experiments import gpu_run
from experiments.gpu.parts import PARTS
from experiments.gpu.record import read
from experiments.gpu.table import table_of

ROOT = Path(__file__).resolve().parents[3]

PART = """
import os, signal, subprocess, sys, time
from pathlib import Path
import torch
from experiments.gpu.record import POISONED, Record

folder, how = Path(sys.argv[1]), sys.argv[2]
record = Record(folder / "limits.json", "limits", torch.device("cpu"), quick=True, limit_s=60, seed=0)
if "--resume" in sys.argv:
    record.resume()

def deadly():
    if how == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        (folder / "child").write_text(str(child.pid))
        time.sleep(600)
    if how == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if how == "poison":
        record.rows.append({"name": "deadly", "error": "the GPU is unusable"})
        record.save("running")
        os._exit(POISONED)
    raise ValueError("wrong")

if how == "import":
    raise ImportError("no such module")
record.measure("first", lambda: {"x": 1})
record.measure("deadly", deadly)
record.measure("last", lambda: {"x": 2})
sys.exit(0 if record.finish() else 1)
"""


def run_script(monkeypatch, folder, how, part_s=60.0):
    """Runs PART as the program runs a part; returns the content of its file."""
    (folder / "part.py").write_text(PART)

    def command(call, name, left_s, *, resume):
        return [sys.executable, str(folder / "part.py"), str(folder), how, *(["--resume"] if resume else [])]

    monkeypatch.setattr(gpu_run, "_command", command)
    monkeypatch.setattr(gpu_run, "GRACE_S", 0.5)
    call = gpu_run.Call(folder=folder, device="cpu", quick=True, seed=0)
    gpu_run.run_part(call, "limits", part_s)
    return read(folder / "limits.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [("crash", "signal SIGSEGV"), ("poison", "the GPU is unusable"), ("raise", "ValueError: wrong")],
)
def test_a_row_that_kills_its_process_leaves_the_rows_after_it(monkeypatch, tmp_path, how, said):
    found = run_script(monkeypatch, tmp_path, how)
    assert [row["name"] for row in found["rows"]] == ["first", "deadly", "last"]
    assert said in found["rows"][1]["error"]
    assert found["rows"][2]["x"] == 2
    assert found["status"] == "failed"


@pytest.mark.slow
def test_a_row_that_hangs_is_named_and_no_child_of_it_stays(monkeypatch, tmp_path):
    found = run_script(monkeypatch, tmp_path, "hang", part_s=30.0)
    assert found["status"] == "out of time"
    assert found["rows"][0]["x"] == 1
    assert found["rows"][1]["name"] == "deadly"
    assert "had not ended" in found["rows"][1]["error"]
    child = int((tmp_path / "child").read_text())
    for _ in range(100):
        if not is_running(child):
            return
        time.sleep(0.1)
    pytest.fail(f"process {child} is still there")


def is_running(pid):
    status = Path(f"/proc/{pid}/status")
    try:
        return "State:\tZ" not in status.read_text()
    except OSError:
        return False


@pytest.mark.slow
def test_a_part_that_does_not_begin_shows_why_in_the_table(monkeypatch, tmp_path):
    found = run_script(monkeypatch, tmp_path, "import")
    assert found["status"] == "died"
    assert any("ImportError: no such module" in line for line in table_of("x", tmp_path, {"limits": found}))


def run_program(*arguments, limit_s=280):
    command = [sys.executable, "-m", "experiments.gpu_run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)


def test_what_cannot_run_is_refused_with_what_can(tmp_path):
    for arguments, said in (
        (["nothing"], "there is no part 'nothing'; the parts are limits"),
        (["limits", "--device", "cpu"], "add --quick"),
    ):
        done = run_program(*arguments, "--out", str(tmp_path))
        assert done.returncode == 2
        assert said in done.stderr
    assert "kernels_speed" in run_program("--list").stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_without_a_gpu_it_says_so(tmp_path):
    done = run_program("limits", "--out", str(tmp_path))
    assert done.returncode == 2
    assert "use --device cpu --quick" in done.stderr


@pytest.mark.slow
def test_a_part_writes_its_file_and_the_table_comes_last(tmp_path):
    done = run_program("limits", "--device", "cpu", "--quick", "--out", str(tmp_path), "--seed", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "cpu").iterdir()
    found = read(folder / "limits.json")
    assert (found["status"], found["seed"], found["quick"]) == ("passed", 3, True)
    assert {"copy", "read", "gemm_bfloat16", "launch", "item"} <= {row["name"] for row in found["rows"]}
    environment = json.loads((folder / "environment.json").read_text())
    assert environment["packages"]["torch"] == torch.__version__
    assert len(environment["sources_sha256"]) == 64
    assert done.stdout.splitlines()[1].startswith("== cpu")
    assert not list(folder.glob("*.tmp"))


@pytest.mark.slow
def test_a_part_for_which_no_time_is_left_is_skipped_and_said_to_be(tmp_path):
    done = run_program("limits", "--device", "cpu", "--quick", "--out", str(tmp_path), "--limit-s", "8")
    assert done.returncode == 0
    assert "skipped" in done.stdout
    assert "s of the call's time were left" in done.stdout


@pytest.mark.slow
def test_every_part_has_a_dry_run(tmp_path):
    long = ("--limit-s", "6000")  # beside other tests, and interpreted; it takes 2 minutes on a quiet machine
    done = run_program(*PARTS, "--device", "cpu", "--quick", "--out", str(tmp_path), *long, limit_s=6600)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "cpu").iterdir()
    assert {file.stem for file in folder.glob("*.json")} == {"environment", *PARTS}
    assert os.environ.get("TRITON_INTERPRET") == "1"  # of this process; the parts choose their own
