"""windtunnel sweep: the right points, each saved when it is done, whatever happens to the others."""

import errno
import gc
import io
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from rich.console import Console

import experiments.study.progress as progress
import experiments.sweep.folder as folder_module
from experiments.app.cli import main
from experiments.study.launchers.outcome import Outcome
from experiments.sweep.folder import SweepFolder
from experiments.sweep.plan import MAX_CHECKED_VALUES, Plan, plan_of
from experiments.sweep.run import collect
from experiments.sweep.run_task import FinishedRun, RunTask, tasks_of
from sim.engine.interrupt import Interrupt
from sim.report.config_text import config_yaml
from sim.settings.compose import ConfigSource
from sim.settings.config_groups import CONFIG_DIR
from sim.settings.errors import ConfigError
from sim.settings.resolve import resolved

SOURCE = ConfigSource(config_name="sweep", dirs=[CONFIG_DIR])
SMALL = (
    "model=smollm2_135m",
    "hardware=l4",
    "workload=poisson",
    "workload.num_requests=8",
    "sweep.report=false",
)

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


def sweep(*overrides):
    return main(["sweep", *overrides])


def runs_of(folder="out"):
    return pd.read_parquet(f"{folder}/runs.parquet")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


axes = st.lists(st.integers(2, 5), min_size=1, max_size=4)


def plan_with(sizes):
    keys = [f"workload.k{i}" for i in range(len(sizes))]
    overrides = [
        f"{key}={','.join(str(10 * i + v) for v in range(n))}"
        for i, (key, n) in enumerate(zip(keys, sizes, strict=True))
    ]
    return plan_of(["replicas=3", *overrides], SOURCE)


@settings(max_examples=8)
@given(sizes=axes)
def test_points_are_every_combination_in_the_order_of_a_multirun(sizes):
    plan = plan_with(sizes)
    points = list(plan.points())
    assert [point.index for point in points] == list(range(math.prod(sizes)))
    assert [list(point.overrides) for point in points] == SOURCE.points(
        ["replicas=3", *(f"{axis.key}={','.join(map(str, axis.values))}" for axis in plan.axes)]
    )


@settings(max_examples=8)
@given(sizes=axes)
def test_a_plan_survives_its_file(sizes):
    plan = plan_with(sizes)
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert list(again.points()) == list(plan.points())


@settings(max_examples=8)
@given(sizes=st.lists(st.sampled_from([2, 3, MAX_CHECKED_VALUES, 45]), min_size=1, max_size=3))
def test_the_points_built_beforehand_have_every_value_but_are_few(sizes):
    plan = plan_with(sizes)
    seen = [folder_module._values_at(plan, index) for index in plan.checked()]
    assert len(seen) <= 1 + sum(min(size, MAX_CHECKED_VALUES) for size in sizes)
    for axis in plan.axes:
        found = {row[axis.key] for row in seen}
        assert {axis.values[0], axis.values[-1]} <= found
        assert len(found) == min(len(axis.values), MAX_CHECKED_VALUES)


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine=vllm,sglang", "engine.max_num_seqs=8,16"],
        ["engine.max_num_batched_tokens=512,1024", "seed=1,2", "slo.name=a,b"],  # others refer to it
        ["sim.until_s=null,10", "metrics.warmup_s=1e-3,2"],
        pytest.param(["pools=none,two_gpus", "load=1,2"], marks=pytest.mark.slow),
        pytest.param(["failures=random_crashes", "failures.events.0.mtbf_s=60,90"], marks=pytest.mark.slow),
        ["++slo.name=a,'b c'"],
    ],
    ids=" ".join,
)
def test_a_point_has_the_settings_that_hydra_would_give_it(overrides):
    plan = plan_of([*SMALL, *overrides], SOURCE)
    tasks = tasks_of(list(plan.points()), SOURCE, [], tables=False)
    for task in tasks[-1:]:
        cfg = SOURCE.compose(task.point.overrides)
        wanted = {
            k: v
            for k, v in OmegaConf.to_container(cfg, resolve=True).items()
            if k not in ("sweep", "report", "launcher")
        }
        assert task.config() == wanted


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=1"], "^no setting has several values"),
        (["replicas=1,2", "replicas=3"], "^replicas: is given twice"),
        (
            ["batching=chunked", "batching=orca"],
            "^batching: is given twice; give all its values once, as batching=chunked,orca",
        ),
        (["batching=chunked,orca", "batching=static", "seed=1,2"], "as batching=chunked,orca,static"),
        (["replicas=1,1"], "^replicas=1,1: must be different"),
        (["load=1,1.0"], "^load=1,1.0: must be different"),
        (["workload.arrivals.x=[1,true],[1.0,true]"], "must be different"),
        (["replicas=interval(1,2)"], "^a sweep needs a list of values"),
        (["seed=1,2", "launcher=local,ray"], "^launcher: must have one value"),
        (["seed=1,2", "sweep.tables=true,false"], "^sweep.tables: must have one value"),
        (["output.tables=true,false"], "^output.tables: is not a setting of a sweep; sweep.tables=true"),
        (["seed=range(0,1000)", "load=range(1,1000)"], "^999,000 runs: must be <= 100,000"),
        (["batching=glob(nothing*)", "seed=1,2"], "has no value; a glob matches choices"),
    ],
)
def test_what_is_no_sweep_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(overrides, SOURCE)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["replicas=1,0"], "replicas=0: must be >= 1 (at run 1 (replicas=0)); sweep.unbuildable=skip"),
        (["replikas=1,2"], "replikas: no such group or setting; nearest: replicas"),
        (["batching=chunked,chunkd"], "batching=chunkd: no such choice; nearest: chunked"),
        (["seed=1,2", "launcher.jobs=0"], "launcher.jobs=0: must be >= 1"),
        (
            ["seed=1,2", "report.x=load"],
            "report.x=load: is not an axis of this sweep; its only axis is the seed",
        ),
        (
            ["load=1,2", "report.facet=[lode]"],
            "report.facet=lode: is not an axis of this sweep; nearest: load",
        ),
        (["seed=1,2", "report.format=[pdf]"], "report.format=pdf: no such format"),
        (["seed=1,2", "--multirun"], "--multirun: not needed, because a sweep always"),
        (["seed=1,2", "--cfg", "job"], "--cfg, --info, --resolve: apply to single runs"),
    ],
)
def test_mistakes_are_reported_before_anything_runs(overrides, message, capsys):
    assert sweep(*SMALL, "hydra.run.dir=out", *overrides) == 2
    assert message in capsys.readouterr().err
    assert not Path("out").exists()


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
    assert runs["error"][2] == "replicas=0: must be >= 1"
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


def test_a_run_that_ctrl_c_cut_short_is_not_kept(tmp_path):
    plan = plan_of([*SMALL, "seed=0,1"], SOURCE)
    folder = SweepFolder.create(tmp_path / "out", plan, {})
    points = list(plan.points())
    tasks = tasks_of(points, SOURCE, [], tables=False)
    collect(folder, _CutShort(), tasks, points, Interrupt(), "code", lambda done, failed: None)
    assert folder.rows == {}
    assert len(folder.missing()) == 2


class _CutShort:
    def outcomes(self, work, tasks, interrupt):
        yield Outcome(0, FinishedRun(figures={}, files={}, wall_s=1.0, interrupted=True), None)


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


def _noted(finished, run, then=lambda: None, at=None):
    def noting(self):
        finished.append(self.point.index)
        result = run(self)
        if self.point.index == at:
            then()
        return result

    return noting


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text("aeon01.:-~ '\n", max_size=6),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(config=st.dictionaries(st.text("abc", min_size=1), plain, max_size=4))
def test_a_config_is_read_back_as_it_was(config):
    again = OmegaConf.to_container(OmegaConf.create(config_yaml(config)))
    assert again == config


@pytest.mark.parametrize(
    "config",
    [
        {"a": 1, "b": {"c": "${a}"}, "d": ["${b.c}", "x"], "e": "${b}"},
        {"a": "2", "b": "n${a}", "c": "${.b}"},  # OmegaConf's part
        {"a": "${b}", "b": "${c}", "c": None},
    ],
)
def test_interpolations_are_resolved_as_omegaconf_does(config):
    assert resolved(config) == OmegaConf.to_container(OmegaConf.create(config), resolve=True)


def test_an_interpolation_without_an_end_is_reported():
    with pytest.raises(ConfigError, match=r"^a: "):
        resolved({"a": "${nothing}"})
    with pytest.raises(ConfigError):
        resolved({"a": "${b}", "b": "${a}"})


def test_null_beside_numbers_and_truth_values_are_words_in_the_table(tmp_path):
    plan = plan_of(["engine.num_kv_blocks=null,2000", "load=1,2.5", "engine.x=true,1"], SOURCE)
    folder = SweepFolder.create(tmp_path / "out", plan, {})
    for point in plan.points():
        folder.note_failure(point, "failed", "", "", "c")
    table = folder.table()
    assert table["engine.num_kv_blocks"].tolist() == ["null"] * 4 + ["2000"] * 4
    assert table["load"].tolist() == [1, 1, 2.5, 2.5] * 2
    assert table["engine.x"].tolist() == ["true", "1"] * 4


def test_another_launcher_goes_on_where_the_first_could_not_begin(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    ray = ["launcher=ray", "launcher.address=127.0.0.1:9", "launcher.connect_s=1"]
    assert sweep(*SMALL, "seed=0,1", *ray, "hydra.run.dir=out") == 2
    assert "to run on this machine: windtunnel sweep resume=out launcher=local" in capsys.readouterr().err
    assert sweep("resume=out", "launcher=local", "launcher.jobs=1") == 0
    assert runs_of()["status"].tolist() == ["done"] * 2


def test_what_cannot_be_drawn_leaves_the_runs_and_says_how_to_draw_them(capsys):
    own = ["seed=0,1", "report.metrics=[foo.bar]", "launcher.jobs=1", "hydra.run.dir=out"]
    assert sweep(*SMALL, *own) == 2
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == "out"
    assert "metric=foo.bar: these runs have no such metric" in printed.err
    assert "windtunnel report sweep=out" in printed.err
    assert runs_of()["status"].tolist() == ["done"] * 2


def test_axes_are_listed_with_every_choice_of_a_glob():
    plan = plan_of(["scheduling=glob(s*)", "seed=range(0,3)"], SOURCE)
    scheduling, seed = plan.axes
    assert {"shortest_job_first", "shortest_remaining"} <= set(scheduling.values)
    assert seed.values == (0, 1, 2)
    assert plan.num_points == len(list(itertools.product(scheduling.values, seed.values)))


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
