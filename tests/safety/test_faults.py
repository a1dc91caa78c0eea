"""Every call with which a command writes fails in turn: one sentence, nothing torn, the next try works."""

import gc
import io
import json
import os
from pathlib import Path

import pandas as pd
import pytest
import yaml

from experiments.app.cli import main
from tests.safety.faults import failing

pytestmark = pytest.mark.slow

SMALL = (
    "model=smollm2_135m",
    "hardware=l4",
    "workload=poisson",
    "workload.num_requests=12",
    "workload.arrivals.rate_per_s=20",
)
MOST_CALLS = 300
ALL = [
    ("simulate", *SMALL, "output.timeline=true", "output.vllm_bench=true"),
    ("simulate", "-m", *SMALL, "seed=0,1", "output.report=false", "output.tables=false"),
    ("sweep", *SMALL, "seed=0,1", "launcher.jobs=1", "sweep.progress=false"),
    (
        "goodput",
        *SMALL,
        "goodput.jobs=1",
        "goodput.seeds=[0]",
        "goodput.requests=50",
        "goodput.precision=0.5",
    ),
    ("whatif", *SMALL, "whatif.changes=['load=2']", "whatif.jobs=1", "whatif.seeds=[0,1]"),
    ("capacity", *SMALL, "capacity.jobs=1", "capacity.max_replicas=2", "capacity.seeds=[0]"),
]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def place_of(words):
    return "hydra.sweep.dir=out" if "-m" in words else "hydra.run.dir=out"


def check_files(folder):
    """Asserts that what has a name is whole, and that no temporary file is left."""
    for file in folder.rglob("*"):
        assert file.suffix != ".part", file
        if file.suffix == ".json":
            json.loads(file.read_text())
        elif file.suffix == ".yaml":
            yaml.safe_load(file.read_text())
        elif file.suffix == ".parquet":
            pd.read_parquet(file)
        elif file.suffix == ".html":
            assert file.read_text().rstrip().endswith("</html>"), file


@pytest.mark.parametrize(
    ("words", "stays"),
    [*((words, False) for words in ALL), (ALL[1], True), (ALL[2], True)],
    ids=lambda given: {False: "once", True: "for good"}.get(given) or " ".join(given[:2]),
)
def test_each_failing_call_is_reported_and_nothing_is_torn(words, stays, tmp_path, capsys):
    fails_at, reported = 0, 0
    while True:
        fails_at += 1
        assert fails_at < MOST_CALLS
        with failing(tmp_path, fails_at, stays=stays) as faults:
            code = main([*words, place_of(words), "overwrite=true"])
        captured = capsys.readouterr()
        check_files(tmp_path)
        if not faults.failed:
            break
        where = f"call {fails_at}, {faults.failed}: {captured.err}"
        if code == 0:  # a sweep writes its table several times
            assert "runs.parquet" in faults.failed, where
            assert not stays, where
        else:
            assert code == 1, where
            assert captured.err.count("\n") == 1, where
            assert "No space left on device" in captured.err, where
            reported += 1
        remove_sweep(tmp_path / "out", words)
    assert code == 0, captured.err
    assert reported > 5


def remove_sweep(folder, words):
    """Continues a sweep that has been begun, as its message says, and removes it."""
    if words[0] != "sweep" or not (folder / "sweep.json").exists():
        return
    gc.collect()  # the lock of the sweep that has failed in this process
    assert main(["sweep", "resume=out", "launcher.jobs=1"]) == 0
    check_files(folder)
    for file in sorted(folder.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()


def test_an_answer_is_printed_before_a_full_disk_ends_the_command(tmp_path, capsys):
    for words in ALL[:1] + ALL[3:]:
        with failing(tmp_path, 4, stays=True) as faults:
            assert main([*words, "hydra.run.dir=out", "overwrite=true"]) == 1
        assert faults.failed
        assert len(capsys.readouterr().out.splitlines()) > 5, words


def test_the_harness_sees_what_is_written(tmp_path):
    with failing(tmp_path, 1000) as faults:
        Path("a").write_text("x")
        Path("b").mkdir()
        with Path("b/c").open("wb") as file:
            file.write(b"y")
            os.fsync(file.fileno())
        os.replace("a", "d")
    assert faults.num_calls == 3 + 1 + 4 + 1
    assert io.open is not None
