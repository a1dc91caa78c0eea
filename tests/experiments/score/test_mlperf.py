"""kind=mlperf: throughput of all samples at once, and the highest rate within limits."""

import numpy as np
import pandas as pd
import pytest

from experiments.app.cli import main
from experiments.score import mlperf
from experiments.score.length_shapes import capped_lognormal
from experiments.score.predictions import predict_row
from experiments.study.presets import preset
from hwmodels.levels import Spec

ROW = {
    "id": "mlp-0",
    "model": "llama3.1-8b",
    "scenario": "Offline",
    "gpu": "NVIDIA H100-SXM-80GB",
    "gpus": 2,
    "weights": "fp8",
    "ttft_p99_limit_ms": 500.0,
    "tpot_p99_limit_ms": 50.0,
}


REFERENCES = {
    "llama2-70b": (24_576, 294.45, 1024),
    "mixtral-8x7b": (15_000, 145.9, 1024),
    "llama3.1-405b": (8_313, 684.68, 2000),
    "deepseek-r1": (4_388, 3886.2274, 20_000),
}
"""Samples, output tokens per sample of the reference, and their limit, of benchmarks that count tokens."""


def test_the_outputs_are_those_of_the_reference_models():
    for model, reference in REFERENCES.items():
        data = mlperf.DATA_SETS[model]
        assert (data.samples, data.mean_output, data.max_output) == reference


def test_the_summaries_of_llama_3_1_8b_fill_the_limit(published_8b):
    """GEN_LEN, 8,167,644 for 13,368 samples, counts characters: 128 tokens of 4.8, not 73 tokens of 8.4."""
    samples, _, output, _, most = published_8b
    assert 4 < 8_167_644 / samples / output < 5
    lengths = capped_lognormal(output, most)
    assert set(lengths.values) == {most}


@pytest.fixture(scope="module")
def published_8b():
    """Returns the data set before the fixture below replaces it."""
    return mlperf.DATA_SETS["llama3.1-8b"]


@pytest.fixture(autouse=True)
def _tiny(monkeypatch):
    """Gives one benchmark few short requests and short measurements."""
    data = mlperf.DataSet(100, 60, 40, 200, 100)
    monkeypatch.setitem(mlperf.DATA_SETS, "llama3.1-8b", data)
    monkeypatch.setattr(mlperf, "MEASURED_S", 6.0)
    monkeypatch.setattr(mlperf, "PROBE_REQUESTS", 150)
    for cached in (mlperf.replica_of, mlperf.offline_rate, mlperf.highest_rate):
        cached.cache_clear()


def predicted(**given):
    return mlperf.predict({**ROW, **given}, Spec())["tokens_per_s"]


def test_the_offline_figure_grows_with_the_gpus_and_is_that_of_the_whole_system():
    two, four = predicted(gpus=2), predicted(gpus=4)
    assert four == pytest.approx(2 * two, rel=0.1)


def test_the_offline_run_lasts_as_long_as_a_measurement(monkeypatch):
    counts = []
    seconds = mlperf.offline_seconds

    def noted(system, data, count):
        counts.append(count)
        return seconds(system, data, count)

    monkeypatch.setattr(mlperf, "offline_seconds", noted)
    figure = predicted()
    assert counts[0] == 50, "the share of one of two replicas"
    assert counts[-1] > 50
    assert counts[-1] * 40 * 2 / figure > 0.8 * mlperf.MEASURED_S


def test_a_server_meets_its_limits_at_the_rate_that_is_found_and_not_much_above():
    """A tight limit of the TTFT lowers the rate; all rates are below that of the whole batch at once."""
    offline = predicted()
    loose, tight = (predicted(scenario="Server", ttft_p99_limit_ms=limit) for limit in (500.0, 60.0))
    assert 0 < tight < loose < 1.1 * offline


def test_limits_that_no_rate_meets_are_a_reason():
    row = predict_row("mlperf", Spec(), {**ROW, "scenario": "Server", "ttft_p99_limit_ms": 0.01})
    assert row["status"] == "ttft_p99_limit_ms=0.01, tpot_p99_limit_ms=50: no rate meets them"


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"scenario": "Edge"}, "scenario=Edge: must be one of Offline, Server, Interactive"),
        ({"weights": "int3"}, "weights=int3: must be one of fp4, fp8, bf16"),
        ({"model": "gpt-j"}, "model=gpt-j: its data set is unknown; known: llama2-70b"),
        ({"gpu": "NVIDIA H200-NVL-141GB"}, "hardware=H200-NVL: there is no preset of this name"),
        (
            {"scenario": "Server", "ttft_p99_limit_ms": np.nan},
            "ttft_p99_limit_ms is missing: scenario=Server",
        ),
        ({"gpus": np.nan}, "gpus is missing"),
        ({"model": "llama3.1-405b", "gpus": 4}, "gpus=4: must be a multiple of 8, the GPUs of one replica"),
    ],
)
def test_rows_that_cannot_be_simulated_get_a_reason(given, reason):
    row = predict_row("mlperf", Spec(), {**ROW, **given})
    assert set(row) == {"id", "status"}
    assert row["status"].startswith(reason)


@pytest.mark.parametrize(
    ("written", "known"),
    [
        ("NVIDIA B200-SXM-180GB", "b200_sxm"),
        ("Virtualized NVIDIA H200-SXM-141GB", "h200_sxm"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx_pro_6000_server"),
    ],
)
def test_gpus_are_named_without_maker_and_memory(written, known):
    assert preset("hardware", mlperf.gpu_of({"gpu": written})) == known


def test_the_layout_leaves_half_of_the_memory_for_kv():
    def layout(model, gpu, weights):
        return mlperf.replica_of(mlperf.System(model, gpu, weights, Spec(), 8)).layout

    assert layout("llama2-70b", "H200-SXM", "fp8").num_devices == 1
    assert layout("llama2-70b", "H100-SXM", "fp8").num_devices == 2
    assert layout("llama3.1-405b", "H200-SXM", "fp8").num_devices == 8
    experts = layout("deepseek-r1", "B200-SXM", "nvfp4")
    assert (experts.attention_data_parallel_size, experts.expert_parallel_size) == (8, 8)


@pytest.mark.parametrize("data", list(mlperf.DATA_SETS.values()))
def test_lengths_have_the_published_mean_and_maximum(data):
    scores = np.random.default_rng(0).normal(size=200_000)
    for mean, most in ((data.mean_input, data.max_input), (data.mean_output, data.max_output)):
        drawn = capped_lognormal(mean, most).from_normal(scores)
        assert drawn.mean() == pytest.approx(mean, rel=0.01)
        assert drawn.min() >= 1
        assert drawn.max() <= most


def test_the_command_prints_the_errors(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows = [{**ROW, "tokens_per_s": 1e5}]
    pd.DataFrame(rows).to_csv("measured.csv", index=False)
    assert main(["score", "measured=measured.csv", "kind=mlperf", "latency=spec", "jobs=1"]) == 0
    assert "tokens_per_s: absolute percentage error" in capsys.readouterr().out
    assert list(pd.read_csv("predictions.csv").columns) == ["id", "tokens_per_s", "status"]
