"""Verdicts on a winner within the expected error, computed by hand."""

from __future__ import annotations

import json
import math

import pytest

from experiments.app.cli import main
from experiments.app.settings.compose import ConfigSource
from experiments.app.settings.config_groups import CONFIG_DIR
from experiments.capacity import answer, tables
from experiments.capacity.candidates import Candidate
from experiments.capacity.results import Ranked
from experiments.capacity.within_error import (
    Decision,
    decide,
    kv_shortage,
    verdict,
    verdict_json,
    verdict_sentence,
)
from hwmodels.trust import ALL_GPUS, RATIO, ExpectedError, Level
from sim.metrics.confidence import mean_interval
from sim.settings.scenario import build_scenario
from tests.experiments.capacity.questions import TINY

SOURCE = ConfigSource(config_name="simulate", dirs=[CONFIG_DIR])
ROW = ExpectedError("closed", RATIO, "vllm", "H100 SXM", "dense", Level.measured, 93, 3, 3.0, 10.0)
THROUGHPUT = ROW._replace(figure="throughput", median_percent=3.0, p90_percent=12.0)
TABLE = (
    ROW,
    THROUGHPUT,
    THROUGHPUT._replace(gpu="H200 SXM", median_percent=4.0, p90_percent=16.0),
    THROUGHPUT._replace(gpu=ALL_GPUS, level=Level.relative, median_percent=12.0, p90_percent=35.0),
    ROW._replace(gpu=ALL_GPUS, level=Level.relative, median_percent=5.0, p90_percent=15.0),
)


@pytest.fixture(autouse=True)
def hand_made_table(monkeypatch):
    monkeypatch.setattr("experiments.capacity.within_error.shipped", lambda: TABLE)
    monkeypatch.setattr("sim.setup.notes.shipped", lambda: TABLE)


def fleet(hardware, *overrides):
    return build_scenario(SOURCE.compose(["model=llama3_1_8b", f"hardware={hardware}", *overrides]))


@pytest.mark.parametrize(
    ("more_percent", "decision"),
    [(0.0, "undecided"), (3.0, "undecided"), (3.1, "likely"), (10.0, "likely"), (10.1, "decided")],
)
def test_on_one_gpu_and_engine_the_error_of_the_ratio_decides(more_percent, decision):
    found = decide(more_percent, fleet("h100_sxm"), fleet("h100_sxm", "tensor_parallel_size=2"))
    assert found.is_common
    assert (found.median_percent, found.p90_percent) == (3.0, 10.0)
    assert found.decision.value == decision


def test_between_gpus_the_errors_of_both_throughputs_count():
    found = decide(15.0, fleet("h100_sxm"), fleet("h200_sxm"))
    assert not found.is_common
    assert (found.median_percent, found.p90_percent) == pytest.approx((5.0, 20.0))  # 3, 4 -> 5; 12, 16 -> 20
    assert found.decision is Decision.likely
    assert decide(20.5, fleet("h100_sxm"), fleet("h200_sxm")).decision is Decision.decided


def test_gpu_that_was_never_measured_has_the_larger_error_of_relatives():
    found = decide(30.0, fleet("h100_sxm"), fleet("l40s"))
    assert found.p90_percent == pytest.approx(37.0)  # 12, 35
    assert found.decision is Decision.likely
    assert decide(6.0, fleet("l40s"), fleet("l40s", "tensor_parallel_size=2")).median_percent == 5.0


def test_without_measurements_of_one_candidate_nothing_is_decided():
    found = decide(500.0, fleet("h100_sxm"), fleet("h100_sxm", "engine=tgi"))
    assert found.decision is Decision.unknown
    assert math.isnan(found.p90_percent)
    assert verdict_sentence(found, "1 x tgi") == (
        "Whether 1 x tgi costs more beyond the simulator's error is unknown: this engine profile was never "
        "compared with measurements."
    )
    assert verdict_json(found)["p90_percent"] is None


def test_verdicts_in_words():
    one, two = fleet("h100_sxm"), fleet("h100_sxm", "tensor_parallel_size=2")
    assert verdict_sentence(decide(40.0, one, two), "B") == (
        "The winner is decided within the expected error: B costs 40 % more, and their ratio, on one GPU "
        "and engine, where most errors are common, is expected within 3 % (median) and 10 % (p90)."
    )
    assert verdict_sentence(decide(2.0, one, fleet("h200_sxm")), "B") == (
        "The winner is not decided within the expected error: B costs 2 % more, and their ratio, with "
        "other errors each, is expected within 5 % (median) and 20 % (p90)."
    )
    assert verdict_sentence(decide(5.0, one, two), "B").startswith("The winner is probable, but not decided")
    assert ": B costs as much, and their ratio, on" in verdict_sentence(decide(0.0, one, two), "B")
    assert verdict_json(None) is None
    assert verdict_json(decide(5.0, one, two))["decision"] == "likely"


def ranked(scenario, *, kv_peak, usd_per_hour=1.0):
    candidate = Candidate(name="A", parts={}, overrides=(), scenario=scenario, asked={})
    return Ranked(
        candidate=candidate,
        num_up=1,
        replicas=1,
        usd_per_hour=usd_per_hour,
        share_at_margin=mean_interval([1.0]),
        figures={"kv_peak": mean_interval([kv_peak])},
        limit=None,
        ahead=None,
    )


def test_a_fleet_whose_working_set_fills_its_kv_memory_is_never_decided():
    best = ranked(fleet("h100_sxm"), kv_peak=1.0)
    other = ranked(fleet("h100_sxm", "tensor_parallel_size=2"), kv_peak=0.1, usd_per_hour=2.0)
    found = verdict(best, other)
    assert found.decision is Decision.undecided
    sentence = verdict_sentence(found, "B")
    assert sentence.startswith(
        "The winner is not decided, because the working set of A fills its KV memory of"
    )
    assert verdict(ranked(fleet("h100_sxm"), kv_peak=0.9), other).decision is Decision.decided


def test_kv_memory_that_an_older_vllm_does_not_find_decides_nothing():
    """Llama-3.1-70B in fp8 on one H100: vLLM up to 0.16 has no room for KV (llm-d-benchmark issue 621)."""
    tight = ("model=llama3_1_70b", "model.weights=fp8", "engine.max_model_len=768")
    found = kv_shortage(ranked(fleet("h100_sxm", *tight), kv_peak=0.5))
    assert found.startswith(
        "the KV memory of A is 1.3 GiB on each GPU, and whether an engine finds that much"
    )
    assert kv_shortage(ranked(fleet("h200_sxm", *tight), kv_peak=0.5)) == ""
    fixed = fleet("h100_sxm", *tight, "engine.num_kv_blocks=200")
    assert kv_shortage(ranked(fixed, kv_peak=0.5)) == ""


def test_a_fleet_that_may_not_start_comes_last_whatever_it_costs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(answer, "start_doubt", lambda one: "it is tight" * (one.name == "l4"))
    monkeypatch.setattr(tables, "start_doubt", lambda one: "it is tight")
    asked = ["capacity.hardware=[l4,l40s]", "capacity.quantisations=[null]", "capacity.seeds=[0]"]
    assert (
        main(["capacity", *[word for word in TINY if not word.startswith("capacity.hardware")], *asked]) == 0
    )
    text = " ".join(capsys.readouterr().out.split())
    best, doubtful = json.loads((tmp_path / "out/summary.json").read_text())["ranked"]
    assert doubtful["usd_per_hour"] < best["usd_per_hour"]
    assert f"x {best['candidate']} (" in text.partition("meet")[0]
    assert f"{doubtful['candidate']} costs less" in text
    assert "but comes last: it is tight." in text
    assert "% less, but it may not start" in text
