"""`windtunnel compare` with arms on the command line, as `goodput` takes them."""

from __future__ import annotations

import json

import pandas as pd
import pytest

from experiments.app.cli import main

SMALL = (
    "model=smollm2_135m",
    "workload=poisson",
    "workload.num_requests=30",
    "workload.arrivals.rate_per_s=200",
)
ARMS = "compare.arms=['chunked: batching=chunked','static: batching=static batching.batch_size=4']"


def compare(folder, *words):
    return main(
        [
            "compare",
            *SMALL,
            "compare.seeds=[0,1]",
            "compare.progress=false",
            *words,
            f"hydra.run.dir={folder}",
        ]
    )


def test_arms_of_ones_own_are_compared_on_the_scenario_of_the_command_line(tmp_path, capsys):
    assert compare(tmp_path / "out", ARMS, "compare.jobs=1") == 0
    table = pd.read_parquet(tmp_path / "out/runs.parquet")
    assert table[["seed", "arm"]].values.tolist() == [
        [s, arm] for s in (0, 1) for arm in ("chunked", "static")
    ]
    assert (table["requests.finished"] == 30).all()
    assert (table.groupby("arm")["ttft.mean_s"].mean().idxmax()) == "static"
    assert {file.name for file in (tmp_path / "out").iterdir()} >= {
        "summary.json",
        "compare.html",
        "config.yaml",
    }
    assert "static loses to chunked: output tokens/s" in capsys.readouterr().out


def test_baseline_and_metrics_can_be_chosen(tmp_path):
    metrics = "compare.metrics=[{key: e2e.mean_s, better: lower}]"
    assert compare(tmp_path / "out", ARMS, metrics, "compare.baseline=static", "compare.report=false") == 0
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert [(c["arm"], c["metric"]) for c in summary["comparisons"] if c["arm"] != "static"] == [
        ("chunked", "e2e.mean_s")
    ]


def test_a_setting_may_be_swept_in_every_arm(tmp_path, capsys):
    words = [ARMS, "compare.sweep={key: load, values: [0.5, 4]}", "compare.report=false", "compare.jobs=1"]
    assert compare(tmp_path / "out", *words) == 0
    table = pd.read_parquet(tmp_path / "out/runs.parquet")
    assert table.groupby(["arm", "swept"]).size().to_dict() == {
        (arm, load): 2 for arm in ("chunked", "static") for load in (0.5, 4.0)
    }
    assert "static against chunked over load: TTFT p50 worse at" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compare.arms=[]"], "compare.arms=[]: must be two or more, such as"),
        (
            [ARMS, "compare.baseline=x"],
            "compare.baseline=x: is not in the experiment; allowed: chunked, static",
        ),
        ([ARMS, "seed=3"], "seed=3: must not be set here; compare.seeds sets the seeds"),
        (["compare.arms=['a: seed=1','b: load=2']"], "compare.seeds sets the seeds"),
        (
            ["compare.arms=['a: batching=statik','b: batching=static']"],
            "arm a: batching=statik: no such choice",
        ),
        ([ARMS, "compare.sweep={key: seed, values: [1]}"], "compare.sweep.key=seed: must not be set here"),
        ([ARMS, "compare.sweep={key: lod, values: [1]}"], "arm chunked: lod: no such group or setting"),
        ([ARMS, "compare.sweep=load"], "compare.sweep=load: must be a mapping of settings"),
        (["compare.arms=['a: load=2','b: load=1']"], "because arms are compared on the same traffic"),
    ],
)
def test_rejects_wrong_arms(tmp_path, capsys, words, message):
    assert compare(tmp_path / "out", *words) == 2
    assert message in capsys.readouterr().err
