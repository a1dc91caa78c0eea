"""windtunnel sweep: its runs are those of simulate, and its table holds them all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.app.cli import main
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.sweep.folder import SweepFolder
from experiments.sweep.plan import plan_of
from tests.experiments.sweep.small_sweeps import SMALL, SOURCE, runs_of, sweep


def test_help_says_how_to_go_on(capsys):
    assert sweep("--help", "seed=0,1") == 0
    printed = capsys.readouterr().out
    assert "resume=DIR" in printed
    assert "--multirun" not in printed
    assert "launcher.jobs=null" in printed


def test_runs_are_those_of_simulate_and_stand_in_a_table(capsys):
    asked = ["batching=chunked,prefill_first", "seed=0,1", "launcher.jobs=2", "hydra.run.dir=out"]
    assert sweep(*SMALL, *asked, "sweep.report=true", "sweep.tables=true") == 0
    assert "4 of 4 runs done" in capsys.readouterr().out
    runs = runs_of()
    assert runs[["run", "batching", "seed", "status"]].values.tolist() == [
        [0, "chunked", 0, "done"],
        [1, "chunked", 1, "done"],
        [2, "prefill_first", 0, "done"],
        [3, "prefill_first", 1, "done"],
    ]
    assert (
        main(
            [
                "simulate",
                *SMALL[:-1],
                "batching=prefill_first",
                "seed=1",
                "output.report=false",
                "hydra.run.dir=one",
            ]
        )
        == 0
    )
    assert Path("out/3/summary.json").read_bytes() == Path("one/summary.json").read_bytes()
    for table in ("requests", "iterations", "gaps", "itl"):
        assert Path(f"out/3/{table}.parquet").read_bytes() == Path(f"one/{table}.parquet").read_bytes()
    one = OmegaConf.to_container(OmegaConf.load("one/config.yaml"))
    del one["output"]
    assert OmegaConf.to_container(OmegaConf.load("out/3/config.yaml")) == one
    summary = json.loads(Path("one/summary.json").read_text())
    assert runs["ttft.p99_s"][3] == summary["ttft"]["p99_s"]
    assert "Parallel coordinates" not in Path("out/sweep.html").read_text()  # one axis


def test_null_beside_numbers_and_truth_values_are_words_in_the_table(tmp_path):
    plan = plan_of(["engine.num_kv_blocks=null,2000", "load=1,2.5", "engine.x=true,1"], SOURCE)
    folder = SweepFolder.create(tmp_path / "out", plan, {})
    for point in plan.points():
        folder.note_failure(point, "failed", "", "", "c")
    table = folder.table()
    assert table["engine.num_kv_blocks"].tolist() == ["null"] * 4 + ["2000"] * 4
    assert table["load"].tolist() == [1, 1, 2.5, 2.5] * 2
    assert table["engine.x"].tolist() == ["true", "1"] * 4


def test_what_cannot_be_drawn_leaves_the_runs_and_says_how_to_draw_them(capsys):
    own = ["seed=0,1", "report.metrics=[foo.bar]", "launcher.jobs=1", "hydra.run.dir=out"]
    assert sweep(*SMALL, *own) == 2
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "out"
    assert "metric=foo.bar: these runs have no such metric" in printed.err
    assert "windtunnel report sweep=out" in printed.err
    assert runs_of()["status"].tolist() == ["done"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["joblib", "submitit_local"])
def test_hydras_own_launchers_run_a_multirun_of_simulate(launcher, tmp_path):
    pytest.importorskip(f"hydra_plugins.hydra_{launcher.removesuffix('_local')}_launcher")
    words = [
        "simulate",
        "--multirun",
        f"hydra/launcher={launcher}",
        "seed=0,1",
        *SMALL[:-1],
        "output.report=false",
    ]
    path = {**os.environ, "PYTHONPATH": str(CONFIG_DIR.parent)}
    line = [sys.executable, "-m", "experiments.app.cli", *words, "hydra.sweep.dir=out"]
    done = subprocess.run(
        line, cwd=tmp_path, env=path, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("out/*/summary.json"))) == 2
