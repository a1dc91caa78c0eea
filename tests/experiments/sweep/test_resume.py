"""Sweeps that are resumed: only missing runs are run, and what is no sweep is refused."""

import gc
import json
import sys
from pathlib import Path

import pandas as pd
import pytest

from experiments.sweep.folder import SweepFolder
from experiments.sweep.plan import plan_of
from experiments.sweep.run_task import RunTask
from sim.settings.errors import ConfigError
from tests.experiments.sweep.small_sweeps import SMALL, SOURCE, _noted, runs_of, sweep


def test_resume_runs_what_is_missing_and_nothing_else(capsys, monkeypatch):
    assert sweep(*SMALL, "replicas=1,2", "seed=0,1", "launcher.jobs=1", "hydra.run.dir=out") == 0
    whole = runs_of().drop(columns="wall_s")
    Path("out/2/summary.json").unlink()
    finished = []
    monkeypatch.setattr(RunTask, "run", _noted(finished, RunTask.run))
    assert sweep("resume=out", "launcher.jobs=1") == 0
    assert finished == [2]
    assert "3 runs done; 1 missing or failed" in capsys.readouterr().out
    pd.testing.assert_frame_equal(runs_of().drop(columns="wall_s"), whole)
    Path("out/runs.parquet").write_bytes(b"not ours")  # the folders say it all
    assert sweep("resume=out") == 0
    assert finished == [2]
    again = runs_of()
    same = {"check_dtype": False}
    pd.testing.assert_frame_equal(again.drop(columns=["wall_s", "code"]), whole.drop(columns="code"), **same)
    Path("out/1/summary.json").unlink()
    monkeypatch.setattr("experiments.sweep.setup.code_version", lambda dirs: "changed")
    assert sweep("resume=out", "launcher.jobs=1") == 0
    assert "has changed since" in capsys.readouterr().out
    assert runs_of()["code"][1] == "changed" != whole["code"][0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resume=nowhere"], "resume=nowhere: no such folder"),
        (["resume=empty"], "resume=empty: is not a sweep folder: it has no sweep.json"),
        (["resume=run"], "it is the folder of a single run"),
        (["resume=other"], "was not written by windtunnel sweep"),
        (["resume=broken"], "is damaged or cut short"),
        (["resume="], "must be one folder"),
        (["resume=done", "replicas=2"], "replicas=2: a resumed sweep has the same points"),
    ],
)
def test_resume_refuses_what_is_no_sweep(arguments, message, capsys):
    for name, file in (
        ("empty", "x"),
        ("run", "summary.json"),
        ("other", "sweep.json"),
        ("broken", "sweep.json"),
    ):
        Path(name).mkdir()
        Path(name, file).write_text("{" if name == "broken" else "{}")
    assert sweep(*arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("alternatives", "message"),
    [
        ([[f"seed={i}" for i in range(1000)]] * 4, "1,000,000,000,000 runs: must be <= 100,000"),
        (["seed=0"], "alternatives: each must be a list of texts"),
        ([[]], "alternatives: each must be a list of texts"),
        ([[1, 2]], "alternatives: each must be a list of texts"),
        (3, "'int' object is not iterable"),
    ],
)
def test_a_damaged_record_is_refused_at_once(alternatives, message, capsys):
    Path("out").mkdir()
    Path("out/sweep.json").write_text(json.dumps({"kind": "windtunnel sweep", "alternatives": alternatives}))
    assert sweep("resume=out") == 2
    assert f"resume=out: sweep.json is damaged: {message}" in capsys.readouterr().err


@pytest.mark.sampled(fast=1, slow=3)
@pytest.mark.parametrize(
    ("recorded", "key"),
    [
        (["launcher=ray", "launcher.address=ray://elsewhere:9"], "launcher.address=ray://elsewhere:9"),
        (
            ["++launcher={_target_: experiments.study.launchers.on_ray.OnRay, address: 'elsewhere:9'}"],
            "launcher.address=elsewhere:9",
        ),
        (["launcher=submitit", "launcher.folder=pickles"], "launcher.folder=pickles"),
        (["launcher=submitit", "+launcher={slurm_setup: [rm]}"], "launcher.slurm_setup=[rm]"),
    ],
)
def test_a_recorded_launcher_sends_no_runs_elsewhere(recorded, key, capsys, tmp_path):
    plan = plan_of([*SMALL, "seed=0,1"], SOURCE)
    about = {"overrides": [*SMALL, "seed=0,1", *recorded], "config_dirs": [], "cwd": "", "code": []}
    SweepFolder.create(tmp_path / "out", plan, about)
    gc.collect()  # its lock
    assert sweep("resume=out") == 2
    assert f"resume=out: was begun with {key}; give it again" in capsys.readouterr().err
    assert not (tmp_path / "pickles").exists()
    assert sweep("resume=out", "launcher=local", "launcher.jobs=1") == 0


def test_a_new_sweep_does_not_overwrite_another(tmp_path):
    plan = plan_of(["seed=0,1"], SOURCE)
    SweepFolder.create(tmp_path, plan, {})
    with pytest.raises(ConfigError, match="contains a sweep; continue it with resume="):
        SweepFolder.create(tmp_path, plan, {})


def test_another_launcher_goes_on_where_the_first_could_not_begin(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    ray = ["launcher=ray", "launcher.address=127.0.0.1:9", "launcher.connect_s=1"]
    assert sweep(*SMALL, "seed=0,1", *ray, "hydra.run.dir=out") == 2
    assert "to run on this machine: windtunnel sweep resume=out launcher=local" in capsys.readouterr().err
    assert sweep("resume=out", "launcher=local", "launcher.jobs=1") == 0
    assert runs_of()["status"].tolist() == ["done"] * 2
