"""Sweeps of which runs crash, are killed or interrupted, or find a full disk: the others are kept."""

import errno
import io
import itertools
import os
import re
import shutil
import signal
import sys
from pathlib import Path

from rich.console import Console

import experiments.study.progress as progress
import experiments.sweep.folder as folder_module
from experiments.study.launchers.local import Local
from experiments.sweep.folder import SweepFolder
from experiments.sweep.plan import plan_of
from experiments.sweep.run import collect
from experiments.sweep.run_task import RunTask
from experiments.sweep.settings import ReportSettings, SweepSettings
from experiments.sweep.setup import SweepOptions
from sim.engine.clock import Interrupt
from tests.experiments.sweep.small_sweeps import SMALL, SOURCE, _noted, runs_of, sweep

KILLER = """
import os, signal
from dataclasses import dataclass
from policies.batching.chunked import Chunked as Base

@dataclass(frozen=True, kw_only=True, slots=True)
class Doomed(Base):
    how: str = "fine"

    def fill(self, view, step, now):
        if self.how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "raises":
            raise RuntimeError("a bug")
        super(Doomed, self).fill(view, step, now)
"""


def test_a_crash_or_a_killed_worker_leaves_the_others(capsys, monkeypatch, tmp_path):
    Path("doomed.py").write_text(KILLER)
    Path("mine/batching").mkdir(parents=True)
    Path("mine/batching/doomed.yaml").write_text("_target_: doomed.Doomed\nhow: fine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    own = ["--config-dir", "mine", "batching=doomed", "batching.how=fine,killed,raises", "seed=0,1"]
    assert sweep(*SMALL, *own, "launcher.jobs=2", "hydra.run.dir=out") == 3
    runs = runs_of().set_index("run")
    assert runs["status"].tolist() == ["done", "done", "failed", "failed", "failed", "failed"]
    assert runs["error"][2].startswith("its process was killed (SIGKILL), perhaps for lack of memory")
    assert "fill raised RuntimeError: a bug; a policy must not raise" in runs["error"][4]
    assert "in fill" in Path("out/4/error.txt").read_text()
    assert "2 of 6 runs done, 4 failed" in capsys.readouterr().out
    assert Path("out/5/error.txt").exists()
    Path("doomed.py").write_text(KILLER.replace('"killed"', '"no more"').replace('"raises"', '"no more"'))
    monkeypatch.delitem(sys.modules, "doomed")
    assert sweep("resume=out", "launcher.jobs=2") == 2
    assert "was begun with configs of your own; add --config-dir" in capsys.readouterr().err
    assert sweep("resume=out", "--trust", "launcher.jobs=2") == 0
    assert set(runs_of()["status"]) == {"done"}
    assert not list(Path("out").glob("*/error.txt"))


def test_points_that_cannot_be_built_may_be_skipped(capsys):
    own = ["replicas=1,0", "seed=0,1", "sweep.unbuildable=skip", "launcher.jobs=1", "hydra.run.dir=out"]
    assert sweep(*SMALL, *own) == 0
    runs = runs_of()
    assert runs["status"].tolist() == ["done", "done", "refused", "refused"]
    assert runs["error"][2] == "replicas=0: must be >= 1 and <= 1,000,000, as each is an engine in memory"
    assert (
        sweep(*SMALL, "replicas=0,-1", "sweep.unbuildable=skip", "hydra.run.dir=none") == 2
    )  # not one is left


def test_a_full_disk_ends_the_sweep_and_keeps_what_is_done(capsys, monkeypatch):
    write = folder_module.write_whole

    def full_from_the_third_run_on(file, content):
        if file.parent.name in ("2", "3"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        write(file, content)

    monkeypatch.setattr(folder_module, "write_whole", full_from_the_third_run_on)
    assert sweep(*SMALL, "seed=range(0,4)", "launcher.jobs=1", "hydra.run.dir=out") == 1
    printed = capsys.readouterr().err
    assert (
        "No space left on device; 2 of 4 runs are done and kept; free some space, then run windtunnel sweep"
        in printed
    )
    assert runs_of()["run"].tolist() == [0, 1]
    assert not Path("out/2").exists()
    monkeypatch.setattr(folder_module, "write_whole", write)
    assert sweep("resume=out", "launcher.jobs=1") == 0
    assert runs_of()["status"].tolist() == ["done"] * 4


def test_ctrl_c_keeps_what_is_done_and_says_how_to_go_on(capsys, monkeypatch):
    finished = []
    monkeypatch.setattr(
        RunTask, "run", _noted(finished, RunTask.run, then=lambda: signal.raise_signal(signal.SIGINT), at=1)
    )
    assert sweep(*SMALL, "seed=range(0,4)", "launcher.jobs=1", "hydra.run.dir=out") == 130
    assert "2 runs left; to continue: windtunnel sweep resume=out" in capsys.readouterr().out
    assert runs_of()["run"].tolist() == [0, 1]


def test_a_run_that_ctrl_c_cut_short_is_not_kept(tmp_path, monkeypatch):
    def cut_short(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunTask, "run", cut_short)
    plan = plan_of([*SMALL, "seed=0,1"], SOURCE)
    folder = SweepFolder.create(tmp_path / "out", plan, {})
    options = SweepOptions(SweepSettings(), ReportSettings(), Local(jobs=1), "code", [])
    collect(folder, options, SOURCE, Interrupt(), lambda done, failed: None)
    assert folder.rows == {}
    assert len(folder.missing()) == 2


def test_a_resumed_sweep_knows_the_code_of_runs_that_its_table_lacked():
    assert sweep(*SMALL, "seed=0,1", "launcher.jobs=1", "hydra.run.dir=out") == 0
    before = runs_of()
    assert before["code"].str.fullmatch("[0-9a-f]{12}").all()
    Path("out/runs.parquet").unlink()  # as after SIGKILL, before the table was written
    Path("out/1/summary.json").unlink()
    assert sweep("resume=out", "launcher.jobs=1") == 0
    assert runs_of()["code"].tolist() == before["code"].tolist()
    assert runs_of()["wall_s"].tolist()[0] == before["wall_s"].tolist()[0]
    Path("out/runs.parquet").unlink()
    Path("out/0/run.json").write_text("{")  # damaged: the only version of the sweep is its code
    assert SweepFolder.open(Path("out"), "resume").rows[0]["code"] == before["code"][0]


def test_a_sweep_whose_folder_is_removed_does_not_advise_to_resume_it(capsys, monkeypatch):
    finished = []
    monkeypatch.setattr(
        RunTask, "run", _noted(finished, RunTask.run, then=lambda: shutil.rmtree("out"), at=1)
    )
    assert sweep(*SMALL, "seed=range(0,4)", "launcher.jobs=1", "hydra.run.dir=out") == 1
    printed = capsys.readouterr()
    assert "out: was removed during the sweep, with all its runs; nothing is left to resume" in printed.err
    assert "resume=" not in printed.err + printed.out


def test_a_log_gets_a_line_now_and_then(monkeypatch, capsys):
    seconds = itertools.count(0, 10)
    monkeypatch.setattr(progress.time, "monotonic", lambda: float(next(seconds)))
    with progress.lasting_progress(Console(file=io.StringIO()), 9, 1, enabled=True) as report:
        for done in range(2, 8):
            report(done, 1)
    first, *_ = lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) <= 3
    assert re.fullmatch(r"5 of 9 runs, 1 failed, 0\.1/s, 0:00:\d\d left", first)
    with progress.lasting_progress(Console(file=io.StringIO()), 9, 0, enabled=False) as report:
        report(1, 0)
    assert not capsys.readouterr().err
