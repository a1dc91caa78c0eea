"""`windtunnel calibrate device=cpu`: its files are read by `simulate`, bad input is one line."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from hwmodels.levels.profile import Profile

torch.set_num_threads(1)


SMALLEST = [
    "measure.budget_s=0.1",
    "measure.max_num_seqs=3",
    "measure.max_model_len=64",
    "measure.max_num_batched_tokens=64",
    "measure.iterations=6",
]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory) -> Path:
    """Returns the config folder that the command wrote for the model random_8m."""
    folder = tmp_path_factory.mktemp("calibrated") / "mine"
    assert main(["calibrate", "device=cpu", "model=random_8m", f"out={folder}", *SMALLEST]) == 0
    return folder


@pytest.mark.slow
def test_what_calibrate_writes_is_read_by_simulate(calibrated, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    chosen = ["hardware=cpu", "engine=cpu", "latency=cpu_random_8m", "model=random_8m", "model.dtype=fp32"]
    traffic = ["workload=offline_batch", "workload.num_requests=3", "workload/lengths=fixed"]
    lengths = ["workload.lengths.prompt_tokens.value=20", "workload.lengths.output_tokens.value=4"]
    folder = ["--config-dir", str(calibrated), "hydra.run.dir=run", "output.report=false"]
    arguments = ["simulate", *folder, *chosen, *traffic, *lengths]
    composed = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR, calibrated]).compose(chosen)
    assert composed.calibration.get("measured_on") is None
    assert main(arguments) == 0
    summary = json.loads(Path("run/summary.json").read_text())
    assert summary["requests"]["finished"] == 3


@pytest.mark.slow
def test_the_table_holds_every_component_and_its_whole_grid(calibrated):
    table = pd.read_parquet(calibrated / "profiles" / "cpu_random_8m.parquet")
    profile = Profile.from_rows({name: table[name].to_numpy() for name in table})
    assert profile.components == {"gemm", "elementwise", "attention", "lm_head"}
    assert set(table["gpu"]) == {"cpu"}
    assert set(table["model"]) == {"random-8m"}


@pytest.mark.slow
def test_the_report_says_how_far_whole_iterations_are_from_the_table(calibrated):
    """Wide bounds: three repetitions on a busy machine. What it reaches stands in the command's output."""
    report = json.loads((calibrated / "profiles" / "cpu_random_8m.json").read_text())
    errors = {row["kind"]: row for row in report["errors"]}
    assert errors["all"]["iterations"] == 6
    assert errors["all"]["median"] < 0.4
    assert report["settings"]["dtype"] == "fp32"
    assert report["machine"]["copy_bytes_per_s"] > 1e8


@pytest.mark.slow
def test_calibrating_again_writes_over_its_own_files_only(calibrated, capsys):
    assert main(["calibrate", "device=cpu", "model=random_8m", f"out={calibrated}", *SMALLEST]) == 0
    (calibrated / "hardware" / "hers.yaml").write_text("_target_: hwmodels.device.Device\n")
    arguments = ["calibrate", "device=cpu", "model=random_8m", f"out={calibrated}", "measure.name=hers"]
    assert main([*arguments, *SMALLEST]) == 2
    assert "was not written by calibrate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["device=cpu"], "model: must be chosen, such as model=random_8m"),
        (["device=tpu", "model=random_8m"], "device=tpu: must be one of cpu, cuda"),
        (["device=cpu", "model=random_9m"], "model=random_9m: no such choice; nearest: random_8m"),
        (["device=cpu", "model=glm_5"], "model: the engine does not support GlmMoeDsaForCausalLM"),
        (["device=cpu", "model=deepseek_v2_lite"], "model_type=deepseek_v2: latent attention computes"),
        (["device=cpu", "model=hf", "model.path=nowhere"], "nowhere"),
        (
            ["device=cpu", "model=random_8m", "model.weights=nvfp4"],
            "model.weights=nvfp4: the engine supports",
        ),
        (["device=cpu", "model=random_8m", "out=a_file"], "out=a_file: cannot be written"),
        (["device=cpu", "model=random_8m", "measure.max_num_seqs=0"], "max_num_seqs=0: must be a whole"),
        (["device=cpu", "model=random_8m", "measure.budget=3"], "measure.budget"),
    ],
)
def test_bad_input_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("a_file").write_text("")
    assert main(["calibrate", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named_with_what_to_do(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "device=cuda", "model=random_8m"]) == 2
    assert "no GPU was found; device='cpu'" in capsys.readouterr().err
    assert not Path("mine").exists()
