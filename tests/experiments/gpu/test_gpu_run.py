"""Dry runs of the GPU measurements: a part that crashes or hangs leaves the others, and its own rows."""

# ruff: noqa: E402  what is imported below needs torch and triton

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from experiments import gpu_run
from experiments.calibrate.engine.files import Files, engine_yaml, hardware_yaml, latency_yaml
from experiments.calibrate.engine.machine import Machine
from experiments.calibrate.engine.timing import timed
from experiments.gpu import validating
from experiments.gpu.comparison import compared, relative_error
from experiments.gpu.engine_correct import agreement
from experiments.gpu.engine_models import (
    LLAMA_8B,
    TINY,
    kv_token_bytes,
    layer_weights,
    prefill_flops,
    public_workload,
    read_once_bytes,
)
from experiments.gpu.gaps import idle_of
from experiments.gpu.limits import Limits
from experiments.gpu.parts import CALLS, PARTS, in_order, limit_s, named
from experiments.gpu.record import Record, UnavailableError, read
from experiments.gpu.speed_cases import Target, shares
from experiments.gpu.table import MOST_LINES, table_of
from experiments.gpu.tile_search import DRY_RUN, SEARCHES, replaced
from experiments.gpu.validating import SUITES, case_runs_of, sum_up, worst_of
from experiments.validate.engine.engine_run import settings_of
from experiments.validate.engine.executor_cache import Built, with_room
from hwmodels.devices.host import CudaGraphs, HostOverhead
from kernels.case import Case
from realengine.runner.memory import Memory
from sim.setup.engine_profile import EngineProfile

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")

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


def make_record(folder, **given):
    return Record(
        folder / "limits.json", "limits", CPU, **{"quick": True, "limit_s": 60.0, "seed": 0, **given}
    )


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
    found = run_script(monkeypatch, tmp_path, "hang", part_s=6.0)
    assert found["status"] == "out of time"
    assert found["rows"][0]["x"] == 1
    assert found["rows"][1]["name"] == "deadly"
    assert "had not ended" in found["rows"][1]["error"]
    child = int((tmp_path / "child").read_text())
    for _ in range(50):
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


def test_rows_are_on_disk_as_they_come_and_what_fails_does_not_stop_the_others(tmp_path):
    record = make_record(tmp_path)

    def missing():
        raise UnavailableError("not here")

    assert record.measure("a", lambda: {"x": float("nan")})["x"] is not None
    assert read(record.path)["rows"][0]["x"] == "nan"  # JSON has none
    assert record.measure("b", missing) is None
    assert record.finish()
    assert record.measure("c", lambda: 1 / 0) is None
    assert record.measure("d", lambda: {"ok": True})["ok"]
    assert "ZeroDivisionError" in read(record.path)["rows"][2]["error"]
    assert not record.finish()


def test_a_check_that_does_not_hold_fails_and_a_number_not_reached_does_not(tmp_path):
    record = make_record(tmp_path)
    record.measure("slow", lambda: {"target": 0.8, "reached": 0.5, "met": False})
    assert record.finish()
    record.measure("wrong", lambda: {"ok": False})
    assert not record.finish()
    assert not make_record(tmp_path).finish()  # no rows: nothing was found


def test_rows_without_time_are_named_and_not_begun(tmp_path):
    record = make_record(tmp_path, limit_s=1.0)
    assert record.measure("late", lambda: pytest.fail("was begun")) is None
    assert read(record.path)["not_measured"] == ["late"]


def test_resumed_rows_are_kept_and_not_measured_again(tmp_path):
    make_record(tmp_path).measure("a", lambda: {"x": 1})
    record = make_record(tmp_path)
    record.resume()
    assert record.measure("a", lambda: pytest.fail("was begun"))["x"] == 1


def test_needed_parts_come_first_unless_they_are_done():
    assert in_order(["kernels_speed"]) == ["limits", "compile", "kernels_speed"]
    assert in_order(["kernels_speed"], done=["limits"]) == ["compile", "kernels_speed"]
    assert in_order(["validate_llama_1b"]) == ["calibrate_llama_1b", "validate_llama_1b"]
    assert in_order([]) == list(CALLS["call1"])
    assert in_order(["call2"], done=CALLS["call1"]) == list(CALLS["call2"])
    assert named("engine") == [name for name in PARTS if name.startswith("engine_")]
    assert named("eng") == []


def test_the_calls_run_every_part_once():
    assert sorted(name for parts in CALLS.values() for name in parts) == sorted(PARTS)
    assert [name for parts in CALLS.values() for name in parts] == list(PARTS)


def test_time_is_shared_by_shares_and_what_is_left_goes_to_later_parts():
    shares = [PARTS[name].share for name in ("limits", "compile")]
    assert limit_s("limits", ["compile"], 100.0) == pytest.approx(100 * shares[0] / sum(shares))
    assert limit_s("compile", [], 90.0) == 90.0
    for call in CALLS:  # of nine minutes, less the reserve for the table
        names, left_s = in_order([call]), 536.0
        for place, name in enumerate(names):  # each part may use all of its limit, and all still fit
            part_s = limit_s(name, names[place + 1 :], left_s)
            assert part_s - gpu_run.GRACE_S >= PARTS[name].least_s
            left_s -= part_s
        assert left_s == pytest.approx(0.0, abs=1e-6)


def test_the_table_is_short_and_begins_with_what_failed(tmp_path):
    rows = [{"name": f"r{i}", "said": "fine"} for i in range(50)] + [{"name": "bad", "error": "no\nway"}]
    part = {"status": "failed", "seconds": 1.0, "rows": rows}
    lines = table_of("gpu", tmp_path, {"limits": part})
    assert lines[2] == "  FAILED bad: no way"
    assert len(lines) == 3 + MOST_LINES
    assert lines[-1] == f"  {51 - MOST_LINES} more lines in limits.json"


def test_idle_time_is_what_no_interval_covers():
    """Two steps: 0-3 (two overlap, a gap of 0.5 between), 10-12; the gap between the steps is 7."""
    idle = idle_of([(10.0, 12.0), (0.0, 1.0), (0.5, 2.0), (2.5, 3.0)], num_steps=2)
    assert idle.gap_s == 7.0
    assert idle.busy_s == pytest.approx((2.0 + 0.5 + 2.0) / 2)
    assert idle.idle_s == pytest.approx((0.5 + 7.0) / 2)
    assert idle_of([(1.0, 2.0)], num_steps=1) == (0.0, 1.0, 0.0)


def test_relative_error_is_a_ratio_of_norms_and_nan_never_passes():
    one = torch.tensor([3.0, 4.0])
    assert relative_error(one + torch.tensor([0.0, 0.5]), one) == pytest.approx(0.1)
    assert relative_error(torch.tensor([0.5]), torch.zeros(1)) == 0.5
    assert not compared({"x": (torch.tensor([torch.nan]), torch.ones(1))}, torch.float32)["ok"]
    assert compared({"x": (torch.ones(1), torch.ones(1))}, torch.float32)["ok"]


def test_agreement_says_where_answers_part():
    assert agreement([(1, 2)], [(1, 2)])["ok"]
    row = agreement([(1, 2), (3, 4, 5)], [(1, 2), (3, 9, 5)])
    assert not row["ok"]
    assert row["same_share"] == 0.5
    assert "request 1 from token 1" in row["why"]


def test_llama_8b_reads_15_gb_a_step():
    """A block: 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336 = 218,103,808; and the output head."""
    assert layer_weights(LLAMA_8B) == 32 * 218_103_808
    assert read_once_bytes(LLAMA_8B, 2) == 2 * (32 * 218_103_808 + 128256 * 4096) == 15_009_316_864
    assert kv_token_bytes(LLAMA_8B, 2) == 131_072
    one_token = 2 * layer_weights(TINY) + 4 * 2 * 4 * 32 * 1 + 2 * 512 * 64
    assert prefill_flops(TINY, 1) == one_token


def test_the_public_workload_is_the_published_one():
    requests = public_workload()
    assert len(requests) == 256
    assert sum(request.num_output_tokens for request in requests) == 133_966
    assert all(100 <= len(request.prompt) <= 1024 for request in requests)


def test_shares_are_of_measured_limits_only():
    case = Case("x", lambda device: lambda: None, bytes_moved=100.0, flops=50.0)
    row = shares(case, 2.0, {"copy": 100.0, "bf16": None})
    assert row == {"bytes_per_s": 50.0, "flops_per_s": 25.0, "copy_share": 0.5}
    assert Target(share_of="copy", at_least=0.5).at_least <= row["copy_share"]


def test_limits_take_the_fastest_way_of_each_kind(tmp_path):
    rows = [
        {"name": "copy", "bytes_per_s": 4.0},
        {"name": "gemm_fp8", "flops_per_s": 5.0},
        {"name": "gemm_fp8_fast", "flops_per_s": 6.0},
        {"name": "gemm_int8", "error": "no"},
    ]
    (tmp_path / "limits.json").write_text(json.dumps({"rows": rows}))
    limits = Limits.of(tmp_path)
    assert (limits.copy_bytes_per_s, limits.fp8_flops_per_s, limits.int8_flops_per_s) == (4.0, 6.0, None)


@pytest.mark.parametrize("search", [*SEARCHES, *DRY_RUN], ids=lambda search: search.name)
def test_every_search_names_a_case_and_all_fields_of_its_table(search):
    assert search.make().name == search.case
    table = importlib.import_module(f"kernels.{search.module}").TILES
    before = dict(table)
    for values in (search.candidates()[0], search.candidates()[-1]):
        with replaced(search.module, values):
            for entry in table.values():
                for tile in tiles_in(entry):
                    assert tile._asdict() == values
        assert table == before
    assert set(search.not_compiled) <= set(search.fields)


def tiles_in(entry):
    if hasattr(entry, "_fields"):
        yield entry
    else:
        for inner in entry.values() if isinstance(entry, dict) else entry:
            yield from tiles_in(inner)


@pytest.fixture(scope="module")
def case_runs(tmp_path_factory):
    """Runs the cases of Llama-3.2-1B with a hand-written calibration, and returns their folder."""
    folder = tmp_path_factory.mktemp("case_runs")
    graphs = CudaGraphs(enabled=True, max_capture_size=256)
    host = HostOverhead(iteration_s=1e-4, sequence_s=1e-6, launch_s=0.0, graph_replay_s=0.0, overlapped=True)
    profile = EngineProfile(
        max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=8192, host=host, cuda_graphs=graphs
    )
    rates = dict.fromkeys(("copy_bytes_per_s", "read_bytes_per_s", "host_copy_bytes_per_s"), 1e12)
    sizes = {"memory_bytes": 141 << 30, "cache_bytes": 50 << 20, "num_sms": 132}
    times = dict.fromkeys(("host_copy_s", "launch_s", "graph_replay_s"), 1e-5)
    machine = Machine(name="GPU", flops_per_s={"bf16": 8e14}, **rates, **sizes, **times)
    files = Files.under(folder / "calibrated_llama_1b", "gpu", "llama-3.2-1b")
    files.check()
    files.hardware.write_text(hardware_yaml("gpu", machine))
    files.engine.write_text(engine_yaml("gpu", profile, 16))
    files.latency.write_text(latency_yaml("gpu", "llama-3.2-1b", files.table))
    files.table.touch()
    path, limits = folder / "validate_llama_1b.json", {"quick": False, "limit_s": 60.0, "seed": 0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validating, "machine_name", lambda device: "gpu")
        return list(case_runs_of(Record(path, "validate_llama_1b", torch.device("cuda"), **limits)))


@pytest.mark.slow
def test_all_cases_are_composed_for_a_gpu_that_was_calibrated(case_runs):
    names = [case_run.name for case_run in case_runs]
    assert names[:4] == [f"load/load_{share}" for share in (30, 60, 90, 110)]
    assert {"policies/swap", "workload_gpu/multi_turn"} <= set(names)
    for case_run in case_runs:
        scenario = case_run.case.scenario
        assert scenario.hardware.name == "gpu"
        assert scenario.engine.max_model_len == 8192
        assert scenario.model.dtype == "bf16"
        assert scenario.model.num_parameters == pytest.approx(1.236e9, rel=1e-3)
        assert case_run.case.settings.thresholds.name == "gpu"
    load = case_runs[0].case
    assert (load.settings.repeats, load.settings.load) == (2, 0.3)
    assert load.scenario.workload.lengths.prompt_tokens.mean == 512
    assert load.scenario.workload.lengths.output_tokens.mean == 128


@pytest.mark.slow
def test_one_executor_serves_all_cases_but_those_of_other_blocks(case_runs):
    gpu = torch.device("cuda")
    settings = {case_run.name: settings_of(case_run.case.scenario, gpu) for case_run in case_runs}
    first = settings[case_runs[0].name]
    built = Built(LLAMA_8B, with_room(first), None, Memory(40_000, 2048, 1 << 21))
    others = {name for name, own in settings.items() if not built.serves(LLAMA_8B, own)}
    assert "policies/radix" in others
    assert others == {
        name for name, own in settings.items() if own.caching.block_size != first.caching.block_size
    }


def case_row(error, noise=0.01, load=0.6, **given):
    figures = {
        "tpot_mean_s": {"error": error, "noise": noise, "threshold": 0.03},
        "ttft_p99_s": {"error": 2 * error, "noise": None, "threshold": 0.10},
        "itl_p99_s": {"error": None, "noise": None, "threshold": 0.10},
    }
    row = {"load": load, "plans": 10, "plans_equal": 10, "ok": True, "preempted": 1, "figures": figures}
    return row | given


def test_a_target_is_judged_by_its_worst_case():
    rows = {"load_60": case_row(0.02), "load_90": case_row(-0.029)}
    worst = worst_of(rows, "tpot_mean")
    assert (worst["reached"], worst["met"], worst["case"]) == (0.029, True, "load_90")
    assert not worst_of(rows | {"load_30": case_row(0.031)}, "tpot_mean")["met"]
    assert worst_of(rows, "p99")["figure"] == "ttft_p99_s"
    assert worst_of(rows, "ttft_mean") is None


def test_above_saturation_ttft_is_not_judged():
    rows = {"load_60": case_row(0.02), "load_110": case_row(0.5, load=1.1)}
    assert worst_of(rows, "p99")["case"] == "load_60"
    assert worst_of(rows, "tpot_mean")["case"] == "load_110"


def test_a_suite_is_summed_up_from_its_own_rows(tmp_path):
    record = make_record(tmp_path)
    load, policies, _ = SUITES
    record.add({"name": "load/load_60", **case_row(0.02)})
    record.add({"name": "load/load_90", "error": "RuntimeError"})
    record.add({"name": "policies/swap", **case_row(0.9, plans_equal=9, ok=False)})
    sum_up(record, load)
    sum_up(record, policies)
    rows = {row["name"]: row for row in record.rows}
    assert (rows["load: decisions"]["reached"], rows["load: decisions"]["met"]) == (1.0, True)
    assert rows["load: tpot_mean"]["met"]
    assert rows["policies: decisions"]["reached"] == 0.9
    assert not rows["policies: decisions"]["met"]
    assert "policies: tpot_mean" not in rows  # few requests


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


class Clock:
    """Replaces the device: work takes the time that it states, at once."""

    now_s = 0.0

    def __init__(self, **_options):
        self.at_s = 0.0

    def record(self):
        self.at_s = Clock.now_s

    def elapsed_time(self, later):
        return 1e3 * (later.at_s - self.at_s)


class Recorded:
    """Replaces a CUDA graph: replays the calls that were recorded."""

    def __init__(self):
        self.taken_s = 0.0

    @contextmanager
    def recording(self):
        begin = Clock.now_s
        yield
        self.taken_s = Clock.now_s - begin
        Clock.now_s = begin

    def replay(self):
        Clock.now_s += self.taken_s


def test_short_calls_are_timed_in_a_graph_of_many(monkeypatch):
    """Two sets of inputs, 10 and 30 us: 20 us a call."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "synchronize": lambda *device: None,
        "Event": Clock,
        "CUDAGraph": Recorded,
        "graph": lambda graph: graph.recording(),
        "Stream": lambda: stream,
        "current_stream": lambda: stream,
        "stream": lambda side: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)

    def call(seconds):
        Clock.now_s += seconds

    found = timed([lambda: call(10e-6), lambda: call(30e-6)], torch.device("cuda"))
    assert found.method == "graph"
    assert found.median_s == pytest.approx(20e-6)
    assert found.low_s == pytest.approx(found.high_s)


@pytest.mark.slow
def test_every_part_has_a_dry_run(tmp_path):
    long = ("--limit-s", "6000")  # beside other tests, and interpreted; it takes 2 minutes on a quiet machine
    done = run_program(*PARTS, "--device", "cpu", "--quick", "--out", str(tmp_path), *long, limit_s=6600)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "cpu").iterdir()
    assert {file.stem for file in folder.glob("*.json")} == {"environment", *PARTS}
    assert os.environ.get("TRITON_INTERPRET") == "1"  # of this process; the parts choose their own
