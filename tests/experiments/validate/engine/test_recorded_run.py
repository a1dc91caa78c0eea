"""`windtunnel validate against=FOLDER` with a recording of our own engine: read, replayed, simulated."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from itertools import count

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.calibrate.engine.served import architecture_of
from experiments.validate.engine import engine_run
from experiments.validate.engine.engine_run import run_on_engine
from experiments.validate.engine.executor_cache import ExecutorCache
from experiments.validate.engine.recording import load
from experiments.validate.engine.traffic import exact
from sim.settings.scenario import build_scenario
from tests.experiments.validate.engine.engine_runs import UnevenClock

torch.set_num_threads(1)

ENGINE = ("model=random_8m", "model.dtype=fp32", "engine.max_num_seqs=4", "engine.max_model_len=128")
TRAFFIC = (
    "workload=validation",
    "workload.num_requests=24",
    "workload.arrivals.rate_per_s=300",  # as much as the clock allows: requests queue, and give way
    "workload.lengths.prompt_tokens.mean=30",
    "workload.lengths.output_tokens.mean=12",
)
BLOCKS = "engine.num_kv_blocks=10"

pytestmark = pytest.mark.xdist_group("recorded")  # run once


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Records two runs of a small model in folders 0 and 1, and one of other traffic in folder 2."""
    root = tmp_path_factory.mktemp("recorded")
    source = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
    executors, clocks = ExecutorCache.of("cpu"), map(UnevenClock, count())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_run, "ThreadTimeClock", lambda: next(clocks))  # the same runs on every machine
        for i, seed in enumerate((0, 0, 1)):
            cfg = source.compose([*ENGINE, *TRAFFIC, BLOCKS, f"seed={seed}"])
            config = OmegaConf.to_container(cfg, resolve=True)
            scenario = exact(build_scenario(cfg))
            recording = run_on_engine(scenario, architecture_of(config["model"]), executors, config)
            recording.save(root / str(i))
    return root


@pytest.fixture
def copy(recorded, tmp_path):
    """Copies a recording, for tests that damage it."""
    return shutil.copytree(recorded / "0", tmp_path / "recording")


def validate(folder, against, *arguments, blocks=BLOCKS, page=False):
    given = ["output.progress=false", f"output.report={str(page).lower()}", f"hydra.run.dir={folder}"]
    return main(["validate", f"against={against}", *ENGINE, blocks, *given, *arguments])


def found(folder):
    return json.loads((folder / "validation.json").read_text())


def refusal(capsys, folder, against, *arguments, **settings):
    assert validate(folder, against, *arguments, **settings) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert not (folder / "validation.json").exists()
    return error


def test_a_recording_is_decided_again_and_its_error_taken_apart(recorded, tmp_path, capsys):
    steps = load(recorded / "0").steps
    assert steps["preempted"].sum() > 0
    assert validate(tmp_path, recorded / "0", page=True) == 0
    said, record = capsys.readouterr().out, found(tmp_path)
    num = len(steps)
    assert said.startswith(
        f"{num} of {num} plans of the engine were reproduced, {num} of {num} in the simulator with the "
        "recorded times.\n"
    )
    assert [part["name"] for part in record["decomposition"]] == [
        "decisions",
        "queueing",
        "iteration times",
        "clients",
    ]
    errors = {one["name"]: one["error"] for one in record["metrics"]}
    for metric in ("ttft", "tpot", "e2e"):
        parts = [part["errors"][f"{metric.upper()} mean"] for part in record["decomposition"]]
        assert parts[0] == pytest.approx(0, abs=1e-6)
        assert sum(parts) == pytest.approx(errors[f"{metric}_mean_s"])
    assert {file.name for file in tmp_path.iterdir()} == {
        *("config.yaml", "validation.json", "report.html"),
        *("simulated_requests.parquet", "simulated_iterations.parquet"),
        *("measured_requests_0.parquet", "measured_iterations_0.parquet"),
    }
    page = (tmp_path / "report.html").read_text()
    for text in ("Where the error comes from", "Distributions", "The first 200 iterations", "reproduced"):
        assert text in page


def test_a_recording_of_a_noisy_machine_gets_no_verdict_unless_none_is_wanted(copy, tmp_path, capsys):
    about = json.loads((copy / "recording.json").read_text())
    about["engine"] |= {"pace": {"median": 1.1, "p10": 0.9, "p90": 1.8}, "attempts": 4}
    (copy / "recording.json").write_text(json.dumps(about))
    assert validate(tmp_path / "a", copy) == 3
    said, record = capsys.readouterr(), found(tmp_path / "a")
    assert said.err.startswith("windtunnel: no verdict: the machine was too noisy; run it again while")
    assert said.err.count("\n") == 1
    assert "There is no verdict on the figures, because the machine's pace varied by 100 %" in said.out
    assert "run 0: the quietest of 4 runs" in said.out
    assert record["refusal"].startswith("the machine's pace varied by 100 %")
    assert record["verdict"] is None
    assert all(one["threshold"] is None and not one["verdict"] for one in record["metrics"])
    assert validate(tmp_path / "b", copy, "thresholds=none") == 0
    record = found(tmp_path / "b")
    assert record["refusal"] is None


def test_the_simulated_requests_are_the_recorded_ones(recorded, tmp_path):
    assert validate(tmp_path, recorded / "0") == 0
    simulated = pd.read_parquet(tmp_path / "simulated_requests.parquet")
    measured = pd.read_parquet(tmp_path / "measured_requests_0.parquet")
    for column in ("request_id", "arrival_s", "prompt_tokens", "output_tokens", "status"):
        assert simulated[column].tolist() == measured[column].tolist()


def test_two_runs_give_a_noise_floor(recorded, tmp_path, capsys):
    assert validate(tmp_path, f"[{recorded / '0'},{recorded / '1'}]") == 0
    record = found(tmp_path)
    errors = {one["name"]: one for one in record["metrics"]}
    assert 0 < errors["tpot_mean_s"]["noise"] < 1
    assert record["measured_runs"] == ["run 0", "run 1"]
    num = sum(len(load(recorded / name).steps) for name in ("0", "1"))
    assert f"{num} of {num} plans" in capsys.readouterr().out
    assert (tmp_path / "measured_requests_1.parquet").exists()


def test_runs_of_other_traffic_are_no_repetitions(recorded, tmp_path, capsys):
    error = refusal(capsys, tmp_path, f"[{recorded / '0'},{recorded / '2'}]")
    assert f"{recorded / '2'} is not a repetition of {recorded / '0'}" in error


def test_other_settings_are_refused_with_what_to_add(recorded, tmp_path, capsys):
    """The suggested arguments remove the error."""
    error = refusal(
        capsys, tmp_path, recorded / "0", "batching=prefill_first", blocks="engine.num_kv_blocks=11"
    )
    assert error.startswith(f"windtunnel: against={recorded / '0'}: was recorded with other settings; add  ")
    advice = re.search(r"add  (.*)  or check_config=false", error).group(1).split(" ")
    assert advice == ["engine.num_kv_blocks=10", "batching=chunked"]
    assert validate(tmp_path, recorded / "0", advice[1], blocks=advice[0]) == 0


def test_unless_they_are_not_to_be_checked(recorded, tmp_path, capsys):
    """The first plan that differs is reported, with both plans and the events before it."""
    other = ("batching=static", "batching.batch_size=3")
    assert validate(tmp_path, recorded / "0", *other, "check_config=false") == 3
    said = capsys.readouterr().out.splitlines()[0]
    counts, difference = said.split("First difference at ")
    num_equal, num_steps, num_simulated = map(int, re.findall(r"(\d+) (?:of|plans)", counts))
    assert num_equal == num_simulated < num_steps
    assert re.match(
        rf"step {num_equal}, [\d.]+ s: recorded .*digest .*; replayed .*digest .*\. events before: .*waiting",
        difference,
    )


def test_an_edited_config_is_refused(copy, tmp_path, capsys):
    file = copy / "recording.json"
    about = json.loads(file.read_text())
    about["engine"]["config"]["engine"]["max_num_seqs"] = 5
    file.write_text(json.dumps(about))
    error = refusal(capsys, tmp_path / "out", copy, "engine.max_num_seqs=5")
    assert "recording.json: its config was changed after the recording" in error


def test_of_a_recording_that_was_cut_short_the_complete_beginning_is_used(copy, tmp_path, capsys):
    file = copy / "events.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-4]) + lines[-4][:15])
    num_steps = len(load(copy).steps)
    assert 0 < num_steps < json.loads((copy / "recording.json").read_text())["num_steps"]
    assert validate(tmp_path / "out", copy, page=True) == 0
    said = capsys.readouterr().out
    assert f"{num_steps} of {num_steps} plans of the engine were reproduced, {num_steps} of" in said
    note = f"The recording of run 0 is truncated: its first {num_steps} steps are used."
    assert note in said
    assert note in found(tmp_path / "out")["notes"]
    assert note in (tmp_path / "out" / "report.html").read_text()
    simulated = pd.read_parquet(tmp_path / "out" / "simulated_requests.parquet")
    assert set(simulated["status"]) == {"finished", "unfinished"}


def test_a_clock_that_goes_backwards_is_refused_with_the_step(copy, tmp_path, capsys):
    steps = pd.read_parquet(copy / "steps.parquet")
    steps.loc[5, "end_s"] = steps["start_s"][5] - 1e-3
    steps.to_parquet(copy / "steps.parquet")
    error = refusal(capsys, tmp_path / "out", copy)
    assert f"against={copy}/steps.parquet: step 5: its time goes backwards" in error


def only_the_first_lines(folder):
    file = folder / "events.jsonl"
    file.write_text("\n".join(file.read_text().splitlines()[:1]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: shutil.rmtree(folder), "no such"),
        (lambda folder: (shutil.rmtree(folder), folder.mkdir()), "none of requests.parquet"),
        (lambda folder: (folder / "recording.json").write_text("[]"), "not a recording"),
        (lambda folder: (folder / "recording.json").write_text("{"), "not a recording"),
        (lambda folder: (folder / "steps.parquet").unlink(), "not a recording"),
        (lambda folder: (folder / "steps.parquet").write_text("no table"), "not a recording"),
        (
            lambda folder: pd.DataFrame({"step": [1]}).to_parquet(folder / "steps.parquet"),
            "not a recording",
        ),
        (only_the_first_lines, "not a recording: no step of it is complete"),
    ],
    ids=["gone", "empty", "list", "half", "no steps", "text", "other table", "beginning"],
)
def test_what_is_no_recording_is_refused(copy, tmp_path, capsys, spoil, message):
    spoil(copy)
    error = refusal(capsys, tmp_path / "out", copy)
    assert f"against={copy}" in error
    assert message in error


def test_a_recording_without_a_config_can_be_used_unchecked(copy, tmp_path, capsys):
    """A `Recorder` used directly writes such a recording."""
    recording = load(copy)
    about = {name: value for name, value in recording.engine.items() if not name.startswith("config")}
    replace(recording, engine=about).save(copy)
    error = refusal(capsys, tmp_path / "out", copy)
    assert (
        "recording.json contains no config to compare; check the settings yourself and add check_config=false"
        in error
    )
    assert validate(tmp_path / "out", copy, "check_config=false") == 0
