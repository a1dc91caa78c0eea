"""The experiments that are shipped: they compose, and what they expect holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments.app import cli
from experiments.app.cli import main
from experiments.app.completion import candidates
from experiments.app.settings.compose import ConfigSource, resolved
from experiments.app.settings.config_groups import CONFIG_DIR, first_comment
from experiments.compare.settings import build_settings
from experiments.study.runs import settings_that_differ
from tests.drawn import ALL, DRAW
from tests.experiments.compare.own_experiment import SHIPPED, arms_of

LARGE = (
    "autoscaling_day",
    "disaggregation_long_inputs",
    "disaggregation_short_inputs",
    "fcfs_mlfq_s3_sjf",
    "lora_packed",
    "lora_thousands",
    "orca_vllm_sarathi_fastgen",
    "prefill_decode_interference",
    "replicas_against_tensor_parallel",
    "retry_storm",
    "tensor_parallel_links",
)
"""Experiments with arms that take more than a second to compose."""


@pytest.mark.sampled(fast=5, slow=10)
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if path.stem in LARGE else path for path in SHIPPED],
    ids=lambda path: path.stem,
)
def test_every_shipped_experiment_composes_and_builds(path):
    cfg = ConfigSource(config_name="compare", dirs=[CONFIG_DIR]).compose([f"experiment={path.stem}"])
    settings, arms = build_settings(resolved(cfg)), arms_of(cfg, [CONFIG_DIR])
    experiment = settings.experiment
    assert first_comment(path), "windtunnel list experiment shows it"
    assert len(arms) * len(experiment.seeds) == experiment.num_runs
    assert len(experiment.seeds) >= 5
    assert experiment.source
    assert experiment.expect
    assert settings_that_differ([p for p in arms if p.swept == experiment.swept[0]])


TAKES_MINUTES = ("autoscaling_day",)
"""Experiments that only `make nightly` runs: a day of traffic takes twelve minutes."""


@pytest.mark.sampled(slow=10)
@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [path for path in SHIPPED if DRAW == ALL or path.stem not in TAKES_MINUTES],
    ids=lambda path: path.stem,
)
def test_what_every_shipped_experiment_expects_holds(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", f"experiment={path.stem}", f"hydra.run.dir={tmp_path}", "report=false"]) == 0
    judged = json.loads((tmp_path / "summary.json").read_text())["expectations"]
    assert [expectation["outcome"] for expectation in judged] == ["held"] * len(judged)


def on_trace(trace: Path) -> str:
    """Returns the setting that replays Mooncake's trace instead of traffic like it."""
    return f'also=["workload=mooncake_jsonl","workload.path={trace}","workload.window_by_seed=true"]'


@pytest.mark.slow
@pytest.mark.parametrize("name", ["prefix_caches_on_mooncake", "routers_on_mooncake"])
def test_an_experiment_on_traffic_like_mooncakes_takes_the_trace_as_well(name, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 9, "output_length": 5, "hash_ids": [0]}\n')
    cfg = ConfigSource(config_name="compare", dirs=[CONFIG_DIR]).compose(
        [f"experiment={name}", on_trace(trace)]
    )
    for arm in arms_of(cfg, [CONFIG_DIR]):
        assert arm.config["workload"]["path"] == str(trace)
        assert arm.config["workload"]["duration_s"] == 600


def test_a_trace_that_is_missing_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["experiment=prefix_caches_on_mooncake", on_trace(Path("missing.jsonl"))]
    assert main(["compare", *arguments, f"hydra.run.dir={tmp_path}/out"]) == 2
    error = capsys.readouterr().err
    assert re.search(r"arm no_cache: .*path=missing.jsonl: no such file", error), error
    assert not (tmp_path / "out").exists()


def test_shell_completion_and_list_know_experiments(capsys):
    names = {name: command.config_name for name, command in cli.COMMANDS.items() if command.config_name}
    assert "experiment=gqa_mqa_mla" in candidates(["compare", "experiment="], list(cli.COMMANDS), names)
    assert candidates(["comp"], list(cli.COMMANDS), names) == ["compare", "completion"]
    assert main(["list", "experiment"]) == 0
    assert "prefill_decode_interference" in capsys.readouterr().out


def test_help_shows_the_experiments_own_settings(capsys):
    assert main(["compare", "--help", "experiment=gqa_mqa_mla"]) == 0
    page = capsys.readouterr().out
    assert "gqa_mqa_mla*" in page
    assert "experiment.baseline=mha" in page
    assert re.search(r"jobs=null +number of processes; null: one per core", page)
