"""The cases in which the engine is compared with the simulator on a GPU, and how they are judged."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

pytest.importorskip("triton")

import torch

from experiments.calibrate.engine.files import Files, engine_yaml, hardware_yaml, latency_yaml
from experiments.calibrate.engine.machine import Machine
from experiments.gpu import validating
from experiments.gpu.engine_models import LLAMA_8B
from experiments.gpu.record import Record
from experiments.gpu.validating import SUITES, case_runs_of, sum_up, worst_of
from experiments.validate.engine.engine_run import settings_of
from experiments.validate.engine.executor_cache import Built, with_room
from hwmodels.devices.host import CudaGraphs, HostOverhead
from realengine.runner.memory import Memory
from sim.setup.engine_profile import EngineProfile
from tests.experiments.gpu.records import make_record


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
