"""The cases in which the engine is compared with the simulator on a GPU, and what a case is judged by."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import torch

from experiments.calibrate.engine.files import Files, engine_yaml, hardware_yaml, latency_yaml
from experiments.calibrate.engine.machine import Machine
from experiments.gpu import fidelity
from experiments.gpu.engine_models import LLAMA_8B
from experiments.gpu.measurement import Run
from experiments.validate.engine.engine_run import settings_of
from experiments.validate.engine.executor_cache import Built, with_room
from hwmodels.host import CudaGraphs, HostOverhead
from realengine.runner.memory import Memory
from sim.setup.engine_profile import EngineProfile


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    """Returns the cases of all suites on a GPU with a hand-written calibration."""
    folder = tmp_path_factory.mktemp("results")
    host = HostOverhead(iteration_s=1e-4, sequence_s=1e-6, launch_s=0.0, graph_replay_s=0.0, overlapped=True)
    profile = EngineProfile(
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        host=host,
        cuda_graphs=CudaGraphs(enabled=True, max_capture_size=128),
    )
    rates = dict.fromkeys(("copy_bytes_per_s", "read_bytes_per_s", "host_copy_bytes_per_s"), 1e12)
    sizes = {"memory_bytes": 141 << 30, "cache_bytes": 50 << 20, "num_sms": 132}
    times = dict.fromkeys(("host_copy_s", "launch_s", "graph_replay_s"), 1e-5)
    machine = Machine(name="GPU", flops_per_s={"bf16": 8e14}, **rates, **sizes, **times)
    files = Files.under(folder / "calibrated", "gpu", "llama-3.1-8b")
    files.check()
    files.hardware.write_text(hardware_yaml("gpu", machine))
    files.engine.write_text(engine_yaml("gpu", profile, 16))
    files.latency.write_text(latency_yaml("gpu", "llama-3.1-8b", files.table))
    files.table.touch()
    run = Run(folder, "cuda", rehearse=False, seed=0, left_s=1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fidelity, "machine_name", lambda device: "gpu")
        chosen = (fidelity.LOAD, *fidelity.MORE)
        return [(one, case) for one in chosen for case in fidelity.cases_of_suite(one, run)]


@pytest.mark.slow
def test_all_cases_are_composed_for_a_gpu_that_was_calibrated(cases):
    names = [f"{one.suite}/{case.name}" for one, case in cases]
    assert names[:5] == ["load/load_60", *(f"load/load_{share}" for share in (30, 60, 90, 110))]
    assert {"policies/swap", "workload_gpu/multi_turn", "speculation/ngram"} <= set(names)
    for _, case in cases:
        assert case.scenario.hardware.name == "gpu"
        assert case.scenario.model.dtype == "bf16"
        assert case.scenario.model.num_parameters == pytest.approx(8.03e9, rel=1e-3)
    load = cases[0][1]
    assert (load.settings.repeats, load.settings.load) == (1, 0.6)
    assert load.scenario.workload.lengths.prompt_tokens.mean == 512
    assert load.scenario.workload.lengths.output_tokens.mean == 128


@pytest.mark.slow
def test_one_executor_serves_all_cases_but_those_of_other_blocks(cases):
    gpu = torch.device("cuda")
    plain = [(one, case) for one, case in cases if one.suite != "speculation"]
    settings = {f"{one.suite}/{case.name}": settings_of(case.scenario, gpu) for one, case in plain}
    first = settings["load/load_60"]
    built = Built(LLAMA_8B, with_room(first), None, Memory(40_000, 2048, 1 << 21))
    others = {name for name, own in settings.items() if not built.serves(LLAMA_8B, own)}
    assert "policies/radix" in others
    assert others == {
        name for name, own in settings.items() if own.caching.block_size != first.caching.block_size
    }


def verdict(num_equal, **errors):
    metrics = [
        SimpleNamespace(metric=SimpleNamespace(name=name), simulated=1.0, real=1.0, error=error, noise=None)
        for name, error in errors.items()
    ]
    return SimpleNamespace(
        num_equal=num_equal,
        num_steps=10,
        decisions="step 7 differs",
        decomposition=SimpleNamespace(num_equal=10, num_steps=10, parts=[]),
        fidelity=SimpleNamespace(metrics=metrics),
        notes=[],
    )


def test_a_case_is_judged_by_the_share_of_equal_decisions_and_its_errors():
    row = fidelity.row_of(verdict(10, e2e_mean_s=-0.03, tpot_mean_s=float("nan")), 0.6, judged=True)
    assert (row["decisions"], row["ok"]) == (1.0, True)
    assert row["e2e_mean_s"] == 0.03
    assert "tpot_mean_s" not in row
    row = fidelity.row_of(verdict(9, e2e_mean_s=0.03), 0.6, judged=False)
    assert (row["decisions"], row["ok"], row["why"]) == (0.95, False, "step 7 differs")
    assert "e2e_mean_s" not in row


def test_above_saturation_ttft_is_not_judged():
    row = fidelity.row_of(verdict(10, ttft_mean_s=0.5, e2e_mean_s=0.1), 1.1, judged=True)
    assert "ttft_mean_s" not in row
    assert row["e2e_mean_s"] == 0.1
