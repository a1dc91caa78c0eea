"""`windtunnel simulate`, through the command line's own entry point."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from experiments.app.cli import main
from sim.cluster.gateway import Gateway
from sim.records.parquet import parquet_bytes
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run
from sim.workload.formats import PlainCsv
from tests.experiments.simulate.small_run import SMALL, build, run


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        assert run(folder, monkeypatch, f"hydra.run.dir={folder}/out") == 0
    return folder / "out"


def test_leaves_every_file(written):
    names = {file.name for file in written.iterdir()}
    assert names == {
        "config.yaml",
        "summary.json",
        "requests.parquet",
        "iterations.parquet",
        "replicas.parquet",
        "events.parquet",
        "gaps.parquet",
        "itl.parquet",
        "records.json",
        "report.html",
    }


def test_the_tables_agree_with_the_summary(written):
    summary = json.loads((written / "summary.json").read_text())
    requests = pd.read_parquet(written / "requests.parquet")
    iterations = pd.read_parquet(written / "iterations.parquet")
    replicas = pd.read_parquet(written / "replicas.parquet")
    assert summary["requests"]["arrived"] == len(requests) == replicas["requests"].sum() == 60
    assert summary["ttft"]["mean_s"] == pytest.approx(requests["ttft_s"].mean())
    assert requests["output_tokens"].sum() == 60 * 256
    assert summary["iterations"]["discarded_tokens"] == 60  # asynchronous scheduling: one behind each stop
    assert iterations["sampled_seqs"].sum() == 60 * 257
    assert replicas["busy_s"].sum() == pytest.approx(iterations["duration_s"].sum())


def test_the_resolved_config_reproduces_the_run(written):
    cfg = OmegaConf.load(written / "config.yaml")
    again, source = build_run(cfg)
    assert parquet_bytes(again.run(source).requests, "zstd") == (written / "requests.parquet").read_bytes()


def test_the_same_seed_gives_the_same_bytes_and_another_seed_does_not(tmp_path, monkeypatch):
    for name, seed in (("one", 1), ("two", 1), ("three", 2)):
        folder = f"hydra.run.dir={tmp_path}/{name}"
        assert run(tmp_path, monkeypatch, folder, f"seed={seed}", "output.report=false") == 0
    for table in ("requests", "iterations", "replicas", "events"):
        one, two, three = (
            (tmp_path / name / f"{table}.parquet").read_bytes() for name in ("one", "two", "three")
        )
        assert one == two
        assert one != three


def test_a_multirun_runs_every_combination(tmp_path, monkeypatch):
    sweep = ("--multirun", f"hydra.sweep.dir={tmp_path}/sweep", "batching=chunked,static", "seed=0,1")
    assert run(tmp_path, monkeypatch, *sweep, "output.report=false") == 0
    found = [OmegaConf.load(file) for file in sorted((tmp_path / "sweep").glob("*/config.yaml"))]
    assert [(cfg.batching._target_.split(".")[-1], cfg.seed) for cfg in found] == [
        ("Chunked", 0),
        ("Chunked", 1),
        ("Static", 0),
        ("Static", 1),
    ]


def test_output_switches_leave_files_out(tmp_path, monkeypatch):
    folder = f"hydra.run.dir={tmp_path}/out"
    assert run(tmp_path, monkeypatch, folder, "output.report=false", "output.tables=false") == 0
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"config.yaml", "summary.json"}


def test_a_run_of_two_pools_tells_of_each_and_of_what_went_wrong(tmp_path, monkeypatch, capsys):
    small = ("+pools.small.engine.max_num_seqs=64", "+pools.small.pipeline_parallel_size=2")
    overrides = ("pools=two_gpus", *small, "failures=crash")
    assert run(tmp_path, monkeypatch, *overrides, "failures.events.0.at_s=2", "max_resends=1") == 0
    written = json.loads(next(tmp_path.rglob("summary.json")).read_text())
    assert set(written["by_pool"]) == {"large", "small"}
    assert written["by_pool"]["small"]["requests"] > 0
    assert written["by_pool"]["small"]["pipeline"]["stages"] == 2
    assert written["by_pool"]["large"]["pipeline"] is None
    assert written["troubles"]["crashes"] == 1
    replicas = pd.read_parquet(next(tmp_path.rglob("replicas.parquet")))
    assert replicas["pool"].tolist() == ["large", "small", "small", "small"]
    assert replicas["crashes"].tolist() == [1, 0, 0, 0]
    assert replicas["down_s"][0] > 0
    shown = capsys.readouterr().out
    assert "Failures: 1 crash" in shown
    assert "large" in shown


def test_a_malformed_trace_names_file_line_and_column(tmp_path):
    trace = tmp_path / "bad.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,5\n1,ten,5\n")
    with pytest.raises(ConfigError, match=r"bad.csv:3:3: prompt_tokens: expected a whole number.*'ten'"):
        build("workload=plain_csv", f"workload.path={trace}")


def test_a_prompt_beyond_the_kv_cache_is_rejected_and_the_run_goes_on(tmp_path):
    trace = tmp_path / "long.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,5000,5\n1,3,5\n")
    scenario, source = build("workload=plain_csv", f"workload.path={trace}", "engine.num_kv_blocks=100")
    result = scenario.run(source)
    assert result.requests["status"].tolist() == ["rejected", "finished"]
    assert "the KV cache holds at most 1600" in result.requests["reason"][0]
    assert result.summary["requests"] == {
        "arrived": 2,
        "finished": 1,
        "rejected": 1,
        "aborted": 0,
        "unfinished": 0,
    }
    assert any("holds at most 1,600 tokens" in note for note in result.summary["notes"])


def test_a_latency_below_the_hardware_is_called_out_of_reach():
    scenario, source = build(*SMALL, "slo.tpot_ms=1")
    notes = scenario.run(source).summary["notes"]
    assert any(note.startswith("slo.tpot_ms=1: cannot be met") for note in notes)


def test_start_up_imports_nothing_heavy():
    program = (
        "import sys, sim, policies.core.engine, hwmodels.assembly.roofline; "
        "print([name for name in ('torch', 'triton', 'hydra', 'plotly') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_activation_memory_follows_the_batching_policys_own_budget():
    own = build("batching.max_num_batched_tokens=65536")[0].plan_memory()
    default = build()[0].plan_memory()
    assert own.activation_bytes > 2 * default.activation_bytes
    assert own.num_blocks < default.num_blocks


def test_running_a_scenario_twice_gives_the_same(tmp_path):
    scenario, source = build(*SMALL, "replicas=3")
    first, second = scenario.run(source).in_pandas().requests, scenario.run().in_pandas().requests
    assert first.equals(second), "a policy that remembers must not carry one run into the next"


def test_ctrl_c_leaves_the_partial_result_and_exits_130(tmp_path, monkeypatch, capsys):
    arrive = Gateway.arrive

    def interrupted(simulation, arrival):
        if arrival.request.request_id == 30:
            signal.raise_signal(signal.SIGINT)
        arrive(simulation, arrival)

    monkeypatch.setattr(Gateway, "arrive", interrupted)
    sweep = ("--multirun", f"hydra.sweep.dir={tmp_path}/sweep", "seed=0,1", "output.report=false")
    assert run(tmp_path, monkeypatch, *sweep) == 130
    assert [folder.name for folder in (tmp_path / "sweep").iterdir() if folder.is_dir()] == ["0"]
    summary = json.loads((tmp_path / "sweep" / "0" / "summary.json").read_text())
    assert summary["interrupted"]
    assert summary["requests"]["arrived"] == 31
    assert "Interrupted at" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_exits_1(monkeypatch, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(tmp_path, monkeypatch, f"hydra.run.dir={tmp_path}/file/out") == 1
    assert "choose another hydra.run.dir" in capsys.readouterr().err


def test_a_single_run_reads_its_trace_once(monkeypatch, tmp_path):
    trace, reads = tmp_path / "trace.csv", []
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0.0,100,10\n0.5,200,20\n")
    source = PlainCsv.blocks
    monkeypatch.setattr(PlainCsv, "blocks", lambda trace: reads.append(1) or source(trace))
    recorded = ("workload=plain_csv", f"workload.path={trace}")
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *recorded, f"hydra.run.dir={tmp_path}/out", "output.progress=false"]) == 0
    assert len(reads) == 1
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["requests"]["finished"] == 2


@pytest.mark.parametrize("overlapped", [True, False])
@pytest.mark.parametrize("servers", [1, 3])
def test_leaping_changes_nothing_behind_a_busy_frontend_and_an_overlapped_host(overlapped, servers):
    engine = (
        f"engine.host.overlapped={overlapped}",
        "engine.frontend_s=0.003",
        f"engine.frontend.servers={servers}",
        "engine.frontend.request_s=0.2",
        "engine.frontend.output_token_s=1e-3",
    )
    leapt, stepped = (
        scenario.run(source).in_pandas().requests
        for scenario, source in (build(*SMALL, *engine, f"sim.leap={leap}") for leap in (True, False))
    )
    assert leapt.equals(stepped)


def test_a_frontend_adds_its_time_to_the_first_token_of_an_idle_engine():
    with_it, without = (
        scenario.run(source).requests["ttft_s"][0]
        for scenario, source in (build(*SMALL, f"engine.frontend_s={s}") for s in (0.01, 0))
    )
    assert with_it - without == pytest.approx(0.01)


def test_an_overlapped_host_sees_arrivals_a_step_later():
    """No host time at all and room for everything: a request waits for half a step, or for one more."""
    none = (
        "engine.host.iteration_s=0",
        "engine.host.sequence_s=0",
        "engine.frontend_s=0",
        "engine.frontend=null",
    )
    waits = {}
    for overlapped in (True, False):
        scenario, source = build(*SMALL[:2], *none, f"engine.host.overlapped={overlapped}")
        waits[overlapped] = scenario.run(source).requests["queue_s"].mean()
    assert waits[True] > 2 * waits[False] > 0
