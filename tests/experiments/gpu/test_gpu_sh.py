"""scripts/gpu.sh, which carries, runs and unpacks the programme on any machine with a GPU."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


@pytest.fixture
def checkout(tmp_path):
    """Makes a folder with what the script needs of a checkout."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "gpu.sh", tmp_path / "scripts")
    gpu = tmp_path / "experiments" / "gpu"
    gpu.mkdir(parents=True)
    (tmp_path / "experiments" / "results").mkdir()
    for name in ("__init__.py", "gpu_run.py", "gpu/__init__.py", "gpu/steps.py", "gpu/targets.py"):
        shutil.copy(ROOT / "experiments" / name, tmp_path / "experiments" / name)
    return tmp_path


def script(checkout, *arguments, **variables):
    env = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, **variables}
    command = ["bash", str(checkout / "scripts" / "gpu.sh"), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)


def archive(path, name, text):
    with tarfile.open(path, "w:gz") as tar:
        member = tarfile.TarInfo(name)
        member.size = len(text)
        tar.addfile(member, io.BytesIO(text.encode()))
    return path


def test_results_are_unpacked_and_the_table_is_printed(checkout, tmp_path):
    with tarfile.open(tmp_path / "gpu_run.tar.gz", "w:gz") as tar:
        for name, text in (
            ("run.jsonl", '{"step": "llama_8b"}\n'),
            ("llama_8b.jsonl", '{"name": "decode_batch1", "mbu": 0.76}\n'),
        ):
            member = tarfile.TarInfo(f"nvidia-h200/2026-11-29/{name}")
            member.size = len(text)
            tar.addfile(member, io.BytesIO(text.encode()))
    done = script(checkout, "unpack", str(tmp_path / "gpu_run.tar.gz"))
    assert done.returncode == 0, done.stderr
    assert (checkout / "experiments/results/nvidia-h200/2026-11-29/run.jsonl").exists()
    assert "| what | target | nvidia-h200, 2026-11-29 |" in done.stdout
    assert "76.0 %, met" in done.stdout


@pytest.mark.parametrize("name", ["../outside", "/tmp/outside", "a/../../outside"])
def test_an_archive_that_leads_out_is_refused(checkout, tmp_path, name):
    done = script(checkout, "unpack", str(archive(tmp_path / "bad.tar.gz", name, "x")))
    assert done.returncode == 2
    assert "nothing was unpacked" in done.stderr
    assert list((checkout / "experiments/results").iterdir()) == []


def test_what_is_missing_is_named_with_what_to_do(checkout, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = script(checkout, "run", PYTHON=str(python))
    assert done.returncode == 2
    assert "simpy>=4.1 hydra-core>=1.3.2,<1.4 omegaconf" in done.stderr
    assert "scripts/gpu.sh wheels" in done.stderr


def test_without_a_command_it_says_how_to_use_it(checkout):
    done = script(checkout)
    assert done.returncode == 2
    assert "scripts/gpu.sh run" in done.stdout
