"""`windtunnel compare` from end to end: its files, its page, its exit codes."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.compare.settings import build_settings
from experiments.study import runs
from experiments.study.figures import figures
from hwmodels.iterations import UnknownIterationError
from sim.cluster.gateway import Gateway
from sim.settings.errors import ConfigError
from sim.settings.scenario import build_run
from sim.setup.scenario import Scenario
from tests.experiments.compare.own_experiment import arms_of, compare, prepare


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """Returns the folder of a comparison of the user's own experiment: `out` and `printed.txt`."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as monkeypatch:
        prepare(folder, monkeypatch)
        with redirect_stdout(StringIO()) as printed:
            assert compare(folder, "jobs=1") == 0
    (folder / "printed.txt").write_text(printed.getvalue())
    return folder


def test_a_users_own_experiment_runs_from_end_to_end(finished):
    printed = (finished / "printed.txt").read_text()
    assert {file.name for file in (finished / "out").iterdir()} == {
        "config.yaml",
        "summary.json",
        "runs.parquet",
        "compare.html",
    }
    table = pd.read_parquet(finished / "out/runs.parquet")
    assert table[["seed", "arm"]].values.tolist() == [[s, arm] for s in (0, 1) for arm in ("chunked", "mine")]
    assert table["requests.finished"].tolist() == [30] * 4
    summary = json.loads((finished / "out/summary.json").read_text())
    assert summary["runs"] == {"done": 4, "asked": 4}
    ttft = next(c for c in summary["comparisons"] if c["arm"] == "mine" and c["metric"] == "ttft.mean_s")
    logs = [math.log(table["ttft.mean_s"][i + 1] / table["ttft.mean_s"][i]) for i in (0, 2)]  # seeds 0 and 1
    assert ttft["against_baseline"]["ratio"]["mean"] == pytest.approx(math.exp(sum(logs) / 2))
    assert summary["verdicts"][0].startswith("Expected: TTFT mean of mine at least ×1.001 that of chunked: ")
    assert all(sentence in printed for sentence in summary["verdicts"])
    assert "only 2 seeds" in printed


def test_a_run_of_an_arm_is_what_simulate_would_have_run(finished):
    row = pd.read_parquet(finished / "out/runs.parquet").iloc[3]
    base = OmegaConf.load(finished / "own/experiment/tiny.yaml").base
    cfg = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR, finished / "own"]).compose(
        [*base, "batching=mine", "seed=1"]
    )
    scenario, source = build_run(cfg)
    summary = figures(scenario.run(source).summary)
    assert (row["arm"], row["seed"]) == ("mine", 1)
    assert row["ttft.mean_s"] == summary["ttft.mean_s"]
    assert row["energy.joules"] == summary["energy.joules"]


def test_the_page_needs_no_network_and_shows_all_parts(finished):
    page = (finished / "out/compare.html").read_text()
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=", page)
    for heading in (
        "Verdicts",
        "Figures",
        "Comparisons",
        "Settings that differ between the arms",
        "Configuration",
    ):
        assert f"<h2>{heading}</h2>" in page
    assert "<th>batching._target_</th>" in page, "the arms differ in their policy"
    assert "policies.batching.chunked.Chunked" in page.split("of a run of chunked")[1]


def test_processes_change_no_figure_and_no_order(folder):
    source = ConfigSource(config_name="compare", dirs=[CONFIG_DIR, folder / "own"])
    arms = arms_of(source.compose(["experiment=tiny"]), source.dirs)
    progress = []
    one, two = (runs.run_all(arms, (0, 1), jobs, lambda *done: progress.append(done)) for jobs in (1, 2))
    assert one.table.equals(two.table)
    assert one.notes == two.notes
    assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)] * 2


def test_arms_that_are_the_same_are_equal_in_every_seed(folder):
    same = "experiment.arms.mine=[batching\\=chunked]"
    assert compare(folder, same, "jobs=1", "report=false") == 0
    verdicts_found = json.loads((folder / "out/summary.json").read_text())["verdicts"]
    assert "mine against chunked: TTFT mean is the same in every seed (2 paired seeds)" in verdicts_found


@pytest.mark.slow
def test_a_sweep_draws_a_line_an_arm_and_multirun_repeats_the_comparison(folder, capsys):
    sweep = "experiment.sweep={key: workload.arrivals.rate_per_s, values: [50, 400], label: requests/s}"
    many = ["--multirun", f"hydra.sweep.dir={folder}/sweep", "experiment.seeds=[0,1],[2,3]"]
    assert compare(folder, sweep, *many, "jobs=1", "report=false") == 0, capsys.readouterr().err
    for number, seeds in (("0", {0, 1}), ("1", {2, 3})):
        table = pd.read_parquet(folder / f"sweep/{number}/runs.parquet")
        assert set(table["seed"]) == seeds
        assert sorted(set(table["swept"])) == [50, 400]
        assert len(table) == 8
    assert "mine against chunked over requests/s: TTFT mean" in capsys.readouterr().out


def test_also_reaches_every_arm_and_an_arms_own_setting_wins(folder):
    also = 'also=["hardware=l40s","batching=static"]'
    assert compare(folder, also, "jobs=1", "report=false") == 0
    cfg = OmegaConf.load(folder / "out/config.yaml")
    settings, arms = build_settings(resolved(cfg)), arms_of(cfg, [CONFIG_DIR, folder / "own"])
    assert settings.also == ("hardware=l40s", "batching=static")
    assert {point.config["hardware"]["name"] for point in arms} == {"L40S"}
    assert arms[0].config["batching"]["_target_"].endswith("Chunked")


def test_ctrl_c_keeps_the_runs_that_are_done_and_exits_130(folder, monkeypatch, capsys):
    arrive, begun = Gateway.arrive, []

    def interrupted(simulation, arrival):
        if arrival.request.request_id == 0:
            begun.append(simulation)
        if len(begun) == 4 and arrival.request.request_id == 10:
            signal.raise_signal(signal.SIGINT)
        arrive(simulation, arrival)

    monkeypatch.setattr(Gateway, "arrive", interrupted)
    assert compare(folder, "jobs=1", "experiment.seeds=[0,1,2]") == 130
    table = pd.read_parquet(folder / "out/runs.parquet")
    assert len(table) == 3, "the fourth was cut short"
    summary = json.loads((folder / "out/summary.json").read_text())
    assert summary["interrupted"]
    assert "Interrupted after 3 of 6 runs." in capsys.readouterr().out


def test_where_every_request_is_rejected_there_is_no_verdict(folder, capsys):
    small = 'experiment.arms.mine=["engine.num_kv_blocks=4"]'  # 64 tokens; every prompt has 512
    assert compare(folder, small, "jobs=1") == 0
    printed = capsys.readouterr().out
    assert "TTFT mean has no value in 2 of 2 runs of mine; these are left out." in printed
    assert "mine against chunked: no verdict on TTFT mean; no seed has a value in both arms" in printed
    assert "not decided (no ratio can be formed)" in printed


def die(config, objects):
    os._exit(1)


def test_a_process_that_dies_is_named(folder, monkeypatch):
    source = ConfigSource(config_name="compare", dirs=[CONFIG_DIR, folder / "own"])
    arms = arms_of(source.compose(["experiment=tiny"]), source.dirs)
    monkeypatch.setattr(runs, "simulate_config", die)
    with pytest.raises(ConfigError, match=r"arm \w+, seed 0: its process ended abruptly"):
        runs.run_all(arms, (0, 1), 2, lambda *done: None)


def test_an_iteration_without_a_price_is_named(folder, monkeypatch):
    def unpriced(scenario, source, report, attach):
        raise UnknownIterationError("no such iteration was recorded")

    source = ConfigSource(config_name="compare", dirs=[CONFIG_DIR, folder / "own"])
    arms = arms_of(source.compose(["experiment=tiny"]), source.dirs)
    monkeypatch.setattr(Scenario, "run", unpriced)
    with pytest.raises(ConfigError, match="arm chunked, seed 5: latency: no such iteration"):
        runs.run_all(arms, (5,), 1, lambda *done: None)
