"""`windtunnel validate against=FILE`, through the command line's own entry point."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from experiments.app.cli import main

SMALL = ("workload=poisson", "workload.num_requests=60", "caching=paged", "output.progress=false")
RUNS = Path(__file__).resolve().parents[4] / "shared" / "data" / "vllm_requests"

needs_runs = pytest.mark.skipif(not RUNS.exists(), reason="the measured runs of vLLM are not here")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Simulates a run that stands for the measured one, and returns its folder."""
    folder = tmp_path_factory.mktemp("simulated")
    assert main(["simulate", *SMALL, f"hydra.run.dir={folder}/out"]) == 0
    return folder / "out"


def validate(folder: Path, *arguments: str) -> int:
    return main(
        ["validate", f"hydra.run.dir={folder}", "overwrite=true", "output.progress=false", *arguments]
    )


def record(folder: Path) -> dict:
    return json.loads((folder / "validation.json").read_text())


def test_a_simulated_run_is_simulated_again_to_the_last_bit(simulated, tmp_path, capsys):
    assert validate(tmp_path, f"against={simulated}", "caching=paged") == 0
    found = record(tmp_path)
    assert found["verdict"] == "met"
    assert found["measured_runs"] == ["out"]
    errors = {one["name"]: one["error"] for one in found["metrics"] if one["error"] is not None}
    assert errors.pop("iteration_median") < 1e-9  # a leap's durations are differences of its ends
    assert set(errors.values()) == {0.0}
    names = {one["name"] for one in found["metrics"] if one["error"] is not None}
    assert {"ttft_p99_s", "e2e_mean_s", "requests_per_s", "kv_use_share_mean", "iteration_median"} <= names
    assert all(curve["mean_absolute_difference"] == 0 for curve in found["curves"])
    out = capsys.readouterr().out
    assert "figures are within the thresholds (gpu)." in out
    assert "report.html" in out


def test_it_leaves_every_file(simulated, tmp_path):
    assert validate(tmp_path, f"against={simulated}", "caching=paged") == 0
    assert {file.name for file in tmp_path.iterdir()} == {
        "config.yaml",
        "validation.json",
        "report.html",
        "simulated_requests.parquet",
        "simulated_iterations.parquet",
        "measured_requests_0.parquet",
        "measured_iterations_0.parquet",
    }
    again = tmp_path / "again"
    assert (
        validate(again, f"against={simulated}", "caching=paged", "output.report=false", "output.tables=false")
        == 0
    )
    assert {file.name for file in again.iterdir()} == {"config.yaml", "validation.json"}


def slower(folder: Path, simulated: Path, factor: float) -> Path:
    """Writes the same requests as a table, each slower by a factor, and returns the file."""
    table = pd.read_parquet(simulated / "requests.parquet")
    for name in ("first_token_s", "last_token_s"):
        table[name] = table["arrival_s"] + factor * (table[name] - table["arrival_s"])
    columns = ["arrival_s", "first_token_s", "last_token_s", "prompt_tokens", "output_tokens"]
    file = folder / f"slower_{factor:g}.csv"
    table[columns].rename(columns={"prompt_tokens": "input_tokens"}).to_csv(file, index=False)
    return file


def test_errors_have_the_sign_of_the_simulated_side(simulated, tmp_path, capsys):
    assert validate(tmp_path, f"against={slower(tmp_path, simulated, 1.25)}", "caching=paged") == 0
    errors = {one["name"]: one for one in record(tmp_path)["metrics"]}
    for name in ("ttft_mean_s", "tpot_mean_s", "e2e_p99_s"):
        assert errors[name]["error"] == pytest.approx(-0.2, abs=1e-5)
        assert errors[name]["verdict"] == "missed"
    assert errors["itl_mean_s"]["real"] is None
    assert "outside: TTFT mean, TTFT p99, TPOT mean, TPOT p99" in capsys.readouterr().out.replace("\n", " ")


def test_repetitions_give_a_noise_floor(simulated, tmp_path):
    files = [slower(tmp_path, simulated, factor) for factor in (0.9, 1.1)]
    listed = f"against=[{','.join(map(str, files))}]"
    assert validate(tmp_path, listed, "caching=paged") == 0
    errors = {one["name"]: one for one in record(tmp_path)["metrics"]}
    assert errors["ttft_mean_s"]["noise"] == pytest.approx(0.2, abs=1e-5)
    assert errors["ttft_mean_s"]["error"] == pytest.approx(0, abs=1e-5)
    assert record(tmp_path)["measured_runs"] == ["slower_0", "slower_1"]


def test_trimming_is_said_and_done(simulated, tmp_path, capsys):
    arguments = (f"against={simulated}", "caching=paged", "metrics.warmup_s=5")
    assert validate(tmp_path, *arguments) == 0
    errors = {one["name"]: one["error"] for one in record(tmp_path)["metrics"]}
    assert errors["ttft_mean_s"] == errors["e2e_p90_s"] == 0
    assert record(tmp_path)["requests"] < 60
    assert "Only requests count that arrived after 5 s" in capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture, folder: Path, *arguments: str) -> str:
    assert validate(folder, *arguments) == 2
    return capsys.readouterr().err


def test_a_recording_with_other_settings_is_refused(simulated, tmp_path, capsys):
    message = refused(capsys, tmp_path, f"against={simulated}", "caching=paged", "model=smollm2_135m")
    assert "was recorded with other settings; add" in message
    assert "model.name=" in message
    message = refused(capsys, tmp_path, f"against={simulated}", "caching=paged", "engine.max_num_seqs=7")
    assert message == (
        f"windtunnel: against={simulated}: was recorded with other settings; add  engine.max_num_seqs=1024  "
        "or check_config=false\n"
    )
    assert (
        validate(
            tmp_path, f"against={simulated}", "caching=paged", "engine.max_num_seqs=7", "check_config=false"
        )
        == 0
    )


def test_what_is_asked_for_must_be_there(simulated, tmp_path, capsys):
    assert "device, against: neither given" in refused(capsys, tmp_path)
    assert "device, against: both given" in refused(capsys, tmp_path, "device=cpu", "against=nowhere.csv")
    assert "no such file" in refused(capsys, tmp_path, "against=nowhere.csv")
    assert "load=0.9: is valid with device=" in refused(capsys, tmp_path, "against=x.csv", "load=0.9")
    file = slower(tmp_path, simulated, 1.0)
    assert "run=night: no such run" in refused(capsys, tmp_path, f"against={file}", "run=night")
    table = pd.read_csv(file)
    both = tmp_path / "both.csv"
    pd.concat([table.assign(run="one"), table.iloc[:9].assign(run="two")]).to_csv(both, index=False)
    assert "run: must be given" in refused(capsys, tmp_path, f"against={both}")
    message = refused(capsys, tmp_path, f"against={both}", "run=[one,two]")
    assert "one and two are not repetitions of one workload" in message
    assert "slo_scales" in refused(capsys, tmp_path, f"against={file}", "slo_scales=[0]")
    message = refused(capsys, tmp_path, f"against={file}", "engine.max_model_len=300")
    assert "the simulated engine allows 300" in message
    message = refused(capsys, tmp_path, f"against={file}", "thresholds=gpus")
    assert "gpu" in message


def test_requests_that_failed_are_not_simulated(simulated, tmp_path, capsys):
    table = pd.read_csv(slower(tmp_path, simulated, 1.0))
    table.loc[::2, "first_token_s"] = np.nan
    table.to_csv(tmp_path / "half.csv", index=False)
    assert validate(tmp_path, f"against={tmp_path / 'half.csv'}", "caching=paged") == 0
    assert len(pd.read_parquet(tmp_path / "simulated_requests.parquet")) == 30
    assert "30 of 60 requests failed; they are not simulated." in capsys.readouterr().out


def test_help_names_its_settings(capsys):
    assert main(["validate", "--help"]) == 0
    out = capsys.readouterr().out
    for text in ("against=null", "device=null", "suite", "thresholds", "slo_scales", "check_config=true"):
        assert text in out


def test_torch_is_not_imported():
    code = "import sys, experiments.validate.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@needs_runs
@pytest.mark.parametrize(
    ("run", "settings", "most"),
    [
        ("rtx4090-llama-3.1-8b", ("hardware=rtx_4090", "engine.max_num_seqs=256"), 0.04),
        ("rtxpro6000-llama-3.1-8b", ("hardware=rtx_pro_6000_server", "engine.max_num_seqs=128"), 0.09),
    ],
)
def test_two_measured_runs_of_vllm(run, settings, most, tmp_path, capsys):
    """Measured 2026-11-22: errors of means +2.5, +2.1, +2.4 %, and -7.1, -2.6, -3.8 %."""
    known = ("engine.max_num_batched_tokens=2048", "engine.gpu_memory_utilization=0.9")
    if run.startswith("rtx4090"):
        known += ("engine.max_model_len=32768", "engine.num_kv_blocks=2588")
    against = f"against={RUNS / 'requests.csv.gz'}"
    layers = ("latency=table", f"latency.path={RUNS}")
    message = refused(capsys, tmp_path, against, f"run={run}")
    for setting in (*settings, *known):
        assert setting in message
    assert validate(tmp_path, against, f"run={run}", *settings, *known, *layers) == 0
    found = record(tmp_path)
    errors = {one["name"]: one for one in found["metrics"]}
    for name in ("ttft_mean_s", "tpot_mean_s", "e2e_mean_s", "e2e_p99_s", "requests_per_s"):
        assert abs(errors[name]["error"]) < most
    assert errors["tpot_mean_s"]["verdict"] == "met"
    curves = {curve["name"]: curve for curve in found["curves"]}
    assert curves["running"]["source"] == "log"
    assert curves["running"]["mean_absolute_difference"] < 0.1 * curves["running"]["real_mean"]
    assert ("kv_use_share" in curves) == run.startswith("rtx4090")
    assert (tmp_path / "report.html").stat().st_size < 6e6
